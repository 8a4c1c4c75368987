"""`tftpu data show`: what a model is given in training, for the eye of a person.

Images become a sheet, a PNG file, each after augmentation and with its label; text is printed,
document by document; of other data the shapes and ranges are.
"""

import io
from typing import Any

from tftpu import input_pipelines
from tftpu.config import Data, Experiment
from tftpu.errors import UserError
from tftpu.input_pipelines import sources
from tftpu.storage import files

IMAGES, ROWS = 24, 3  # examples that are shown if nobody says how many
_SIDE = 192  # pixels of an image on the sheet, about
_COLUMNS = 6
_CHARACTERS = 400  # of a document


def run(
    experiment: Experiment, config: str, output: str | None, examples: int | None, step: int
) -> None:
    """Draws or prints the first examples of a training step."""
    if (examples is not None and examples < 1) or step < 0:
        raise UserError("--examples must be 1 or more, and --step 0 or more.")
    data = experiment.data
    drawn = isinstance(data, sources.Images | sources.StreamedImages)
    if output and not drawn:
        raise UserError("--output is for the sheet of images: text is printed.")
    batch = first(data, experiment.train.seed, step, examples or (IMAGES if drawn else ROWS))
    if drawn:
        path = output or f"{config}_examples.png"
        title = f"{config}: training examples of step {step}, as the model is given them"
        files.write_whole(path, sheet(pixels(data, batch[0]), captions(data, batch[1]), title))
        print(f"{len(batch[1])} examples of step {step} are in {path}")
    elif isinstance(data, sources.Text | sources.Tokens):
        print("\n".join(documents(data, batch)))
    else:
        print("\n".join(ranges(batch)))


def first(data: Data, seed: int, step: int, count: int) -> Any:
    """The first `count` examples of a step, or all if it has fewer: a batch of NumPy arrays."""
    import tensorflow as tf

    whole = data.global_batch_size
    count = min(count, whole)
    # What the first of as many hosts as can be would get: nothing else has to be decoded.
    shares = [n for n in range(count, whole + 1) if whole % n == 0 and n % 2 == 0]
    hosts = whole // min(shares, default=whole)
    batches = input_pipelines.training(data, seed).starting_at(step, 0, hosts)
    batch = next(batches.take(1).as_numpy_iterator())
    return tf.nest.map_structure(lambda array: array[:count], batch)


def pixels(data: Data, images: Any) -> Any:
    """What the model is given, as uint8 pixels (batch, height, width, channels)."""
    import numpy as np
    import tensorflow as tf

    if images.dtype != np.uint8:
        images = ((images.astype(np.float32) + 1.2) * 64).round().clip(0, 255).astype(np.uint8)
    return tf.nn.depth_to_space(images, 2).numpy() if _in_blocks(data) else images


def captions(data: Data, labels: Any) -> list[list[str]]:
    """Lines for each example: its class, or the classes that it is mixed of, largest first."""
    names = input_pipelines.class_names(data)

    def name(label: int) -> str:
        return names[label] if names else f"class {label}"

    if labels.ndim == 1:
        return [[name(label)] for label in labels]
    lines = []
    for shares in labels:
        order = [label for label in shares.argsort()[::-1] if shares[label] >= 0.005]
        whole = shares[order[0]] >= 0.995
        lines.append([name(order[0])] if whole else [_share(shares[i], name(i)) for i in order])
    return lines


def sheet(images: Any, captions: list[list[str]], title: str) -> bytes:
    """A PNG of images in rows, with lines of text below each.

    Args:
        images: (batch, height, width, 1 or 3), uint8, NumPy.
        captions: for each image.
        title: above them.
    """
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    height, width = images.shape[1:3]
    # Small images by whole factors, so that their pixels can be seen.
    scale = max(1, _SIDE // max(height, width))
    height, width = height * scale, width * scale
    font, gap, line = ImageFont.load_default(13), 12, 17
    columns = min(_COLUMNS, len(images))
    rows = -(-len(images) // columns)
    cell = height + line * max(map(len, captions)) + gap
    total = max(columns * (width + gap) + gap, int(font.getlength(title)) + 2 * gap)
    page = Image.new("RGB", (total, rows * cell + 2 * gap + line), "white")
    draw = ImageDraw.Draw(page)
    draw.text((gap, gap // 2), title, "black", font)
    for number, (image, lines) in enumerate(zip(images, captions)):
        row, column = divmod(number, columns)
        x, y = gap + column * (width + gap), gap + line + row * cell
        shown = Image.fromarray(np.broadcast_to(image, (*image.shape[:2], 3)))
        page.paste(shown.resize((width, height), Image.Resampling.NEAREST), (x, y))
        for index, text in enumerate(lines):
            draw.text(
                (x, y + height + 1 + index * line), _fitting(text, font, width), "black", font
            )
    file = io.BytesIO()
    page.save(file, "PNG")
    return file.getvalue()


def documents(data: Data, batch: Any) -> list[str]:
    """Lines that tell the documents in each row of packed text, and its padding."""
    lines = []
    features, _, weights = batch
    rows = features["tokens"] if isinstance(features, dict) else features
    segments = features["segments"] if isinstance(features, dict) else (weights > 0).astype(int)
    text_of = _decoder(data)
    for number, (tokens, numbers) in enumerate(zip(rows, segments)):
        found = sorted(set(numbers.tolist()) - {0})
        lines.append(
            f"row {number}: {len(found)} document{'' if len(found) == 1 else 's'}, {len(tokens):,} "
            f"tokens, of them {int((numbers == 0).sum()):,} padding, "
            f"{int((weights[number] > 0).sum()):,} are predicted from"
        )
        for segment in found:
            own = tokens[numbers == segment]
            text = text_of(own)
            more = f" ... {len(text) - _CHARACTERS:,} characters more"
            text = text if len(text) <= _CHARACTERS + len(more) else text[:_CHARACTERS] + more
            lines.append(f"  document {segment}, {len(own):,} tokens")
            lines += [f"    | {line}" for line in text.splitlines()]
    return lines


def ranges(batch: Any) -> list[str]:
    """A line for each array of a batch: where it is, shape, dtype, least and largest number."""
    import keras

    return [
        f"{'/'.join(map(str, path)) or 'x'}: {array.dtype.name} {array.shape}, "
        f"from {array.min():.4g} to {array.max():.4g}"
        for path, array in keras.tree.flatten_with_path(batch)
    ]


def _share(share: float, name: str) -> str:
    return f"{share:.2f} {name}"


def _in_blocks(data: Data) -> bool:
    return getattr(data, "space_to_depth", False)


def _fitting(text: str, font: Any, width: int) -> str:
    """The text, or as much of it as fits, in so many pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _decoder(data: Data):
    """From token ids to text."""
    if getattr(data, "tokenizer", None):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(data.tokenizer)
        return lambda tokens: tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    if _tokens_are_bytes(data):
        return lambda tokens: bytes(tokens.tolist()).decode(errors="replace")
    return lambda tokens: " ".join(map(str, tokens))


def _tokens_are_bytes(data: Data) -> bool:
    """Whether each token is a byte of UTF-8 text."""
    if isinstance(data, sources.Text) or getattr(data, "train_text", ""):
        return True
    from tftpu.input_pipelines.formats import manifest

    return manifest.read(data.data_dir).about.get("tokenizer") == "bytes"
