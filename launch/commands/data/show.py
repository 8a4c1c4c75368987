"""Shows training examples as the model sees them, after augmentation.

Images are drawn to a PNG file, with their labels; text is printed, document by document; for other
data, shapes, ranges and the first example are printed.

    tftpu data show digits_resnet --examples=12
"""

import dataclasses
import io
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tftpu import input_pipelines
from tftpu.config import DataConfig
from tftpu.errors import UserError
from tftpu.input_pipelines import sources
from tftpu.input_pipelines.convert import packing
from tftpu.launch.output import reporting
from tftpu.launch.run import texts
from tftpu.launch.run.finished import ConfigOrRunOptions
from tftpu.launch.settings import own_code
from tftpu.launch.settings.options import flag
from tftpu.launch.startup import import_tensorflow
from tftpu.runtime.slow import reporting_if_slow
from tftpu.storage import files

if TYPE_CHECKING:
    import numpy as np

IMAGES, ROWS = 24, 3  # examples shown by default
_SIDE = 192  # approximate side of an image on the sheet, in pixels
_COLUMNS = 6
_CHARACTERS = 400  # maximum number of characters shown of a document

Batch = Any  # NumPy arrays, nested as in the batches of the data set


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOrRunOptions):
    """The examples to show."""

    output: str | None = flag(
        None, "PNG file to write", metavar="FILE", shown="<config>_examples.png"
    )
    examples: int | None = flag(
        None, "number of examples", metavar="N", shown="24 images, 3 rows of text"
    )
    step: int = flag(0, "training step of the examples", metavar="N")


def run(options: Options) -> None:
    """Draws or prints examples, beginning at a training step."""
    output, examples, step = options.output, options.examples, options.step
    with reporting_if_slow(f"Loading {options.config}"):
        experiment = options.load_experiment()
    if (examples is not None and examples < 1) or step < 0:
        raise UserError("--examples must be 1 or more, and --step 0 or more.")
    data = experiment.data
    drawn = isinstance(data, sources.Images | sources.StreamedImages)
    if output and not drawn:
        raise UserError("--output works only with images, because text is printed: leave it out.")
    if output and not output.lower().endswith(".png"):
        raise UserError(f"--output={output} must end in .png.")
    with reporting_if_slow("Loading TensorFlow"):
        import_tensorflow()
    with reporting(f"Reading examples from step {step:,} on"):
        prepared = experiment.prepared_data
        count = examples or (IMAGES if drawn else ROWS)
        batch = read_examples(data if drawn else prepared, experiment.train.seed, step, count)
    if drawn:
        path = output or f"{options.name}_examples.png"
        title = f"{options.name}: training examples from step {step} on, as the model sees them"
        captions = format_captions(data, batch[1], *batch[2:])
        files.write_whole(path, draw_sheet(to_pixels(data, batch[0]), captions, title))
        print(f"{len(batch[1])} examples from step {step} on are in {path}")
    elif isinstance(data, sources.Text | sources.Tokens):
        print("\n".join(format_documents(data, batch)))
    else:
        print("\n".join([*format_ranges(batch), *format_first(data, batch)]))
        if prepared is not data:
            print("\n".join(format_prepared(experiment.model, batch)))


def read_examples(data: DataConfig, seed: int, step: int, count: int) -> Batch:
    """Returns `count` examples, beginning at a training step; fewer if the data end before."""
    import numpy as np
    import tensorflow as tf

    whole = data.global_batch_size
    # Only the first host's shard of a batch is decoded. Its size is the smallest even divisor of
    # the batch size that holds the examples; even, because augmentation may mix pairs of images.
    shares = [n for n in range(min(count, whole), whole + 1) if whole % n == 0 and n % 2 == 0]
    hosts = whole // min(shares, default=whole)
    with own_code.failures_of_class(getattr(data, "source", data), "training"):
        pipeline = input_pipelines.training(data, seed)
    batches = input_pipelines.starting_at(pipeline, step, 0, hosts)
    read = list(batches.take(-(-count // whole)).as_numpy_iterator())
    return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays)[:count], *read)


def to_pixels(data: DataConfig, images: "np.ndarray") -> "np.ndarray":
    """Converts the model's input to uint8 pixels (batch, height, width, channels)."""
    import numpy as np
    import tensorflow as tf

    if images.dtype != np.uint8:
        images = ((images.astype(np.float32) + 1.2) * 64).round().clip(0, 255).astype(np.uint8)
    return tf.nn.depth_to_space(images, 2).numpy() if _is_in_blocks(data) else images


def format_captions(
    data: DataConfig, labels: "np.ndarray", weights: "np.ndarray | None" = None
) -> list[list[str]]:
    """Returns lines for each example: its class, or the classes that it mixes, largest first.

    Args:
        data: config of the data.
        labels: class ids, (batch,), or shares of classes, (batch, classes).
        weights: weights of the examples, (batch,), 0 for damaged records; None if all are 1.
    """
    lines = _format_labels(data, labels)
    if weights is None:
        return lines
    return [line if weight else ["left out: damaged"] for line, weight in zip(lines, weights)]


def _format_labels(data: DataConfig, labels: "np.ndarray") -> list[list[str]]:
    with own_code.failures_of_class(data, "class_names"):
        names = input_pipelines.class_names(data)

    def format_class(label: int) -> str:
        return names[label] if names else f"class {label}"

    if labels.ndim == 1:
        return [[format_class(label)] for label in labels]
    lines = []
    for shares in labels:
        order = [label for label in shares.argsort()[::-1] if shares[label] >= 0.005]
        whole = shares[order[0]] >= 0.995
        lines.append(
            [format_class(order[0])]
            if whole
            else [_format_share(shares[i], format_class(i)) for i in order]
        )
    return lines


def draw_sheet(images: "np.ndarray", captions: list[list[str]], title: str) -> bytes:
    """Draws images in rows, with lines of text below each; returns a PNG.

    Args:
        images: (batch, height, width, 1 or 3), uint8, NumPy.
        captions: lines for each image.
        title: line above the images.
    """
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    height, width = images.shape[1:3]
    # Enlarge small images by whole factors, so that their pixels can be seen.
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
                (x, y + height + 1 + index * line), _cut_to_width(text, font, width), "black", font
            )
    file = io.BytesIO()
    page.save(file, "PNG")
    return file.getvalue()


def format_documents(data: DataConfig, batch: Batch) -> list[str]:
    """Returns lines with the documents and the padding of each row of packed text."""
    lines = []
    features, _, weights = batch
    rows = features["tokens"] if isinstance(features, dict) else features
    segments = features["segments"] if isinstance(features, dict) else (weights > 0).astype(int)
    text_of = _choose_decoder(data)
    for number, (tokens, numbers) in enumerate(zip(rows, segments)):
        found = sorted(set(numbers.tolist()) - {0})
        lines.append(
            f"row {number}: {len(found)} document{'' if len(found) == 1 else 's'}, {len(tokens):,} "
            f"tokens, {int((numbers == 0).sum()):,} of them padding; "
            f"{int((weights[number] > 0).sum()):,} have a next token to predict"
        )
        for segment in found:
            own = tokens[numbers == segment]
            text = text_of(own)
            more = f" ... {len(text) - _CHARACTERS:,} characters more"
            text = text if len(text) <= _CHARACTERS + len(more) else text[:_CHARACTERS] + more
            lines.append(f"  document {segment}, {len(own):,} tokens")
            lines += [f"    | {line}" for line in text.splitlines()]
    return lines


def format_prepared(model: Any, batch: Batch) -> list[str]:
    """Returns lines with the tokens that the preprocessor kept of each text, without padding.

    Args:
        model: the KerasHub model of the config.
        batch: the output of the model's preprocessor; without tokens, [] is returned.
    """
    from tftpu.models.keras_hub import presets

    x = batch[0] if isinstance(batch, tuple) else batch
    if not isinstance(x, dict) or not {"token_ids", "padding_mask"} <= x.keys():
        return []
    tokenizer, lines = presets.load_preprocessor(model).tokenizer, []
    for number, (ids, mask) in enumerate(zip(x["token_ids"], x["padding_mask"])):
        known = ids[mask.astype(bool)]
        count = f"{len(known):,} of {len(ids):,} tokens"
        lines.append(f"text {number}, {count}, with its start and end tokens:")
        lines += [f"    | {line}" for line in format_tokens(tokenizer, known).splitlines()]
    return lines


def format_tokens(tokenizer: Any, ids: "np.ndarray") -> str:
    """Returns the text of tokens, with the names of special tokens that `detokenize` leaves out."""
    special = getattr(tokenizer, "special_token_ids", ())
    hidden = {n: tokenizer.id_to_token(n) for n in special if not tokenizer.detokenize([n])}
    parts = itertools.groupby(ids.tolist(), hidden.get)
    return "".join(
        name * len(list(run)) if name else tokenizer.detokenize(list(run)) for name, run in parts
    )


def format_ranges(batch: Batch) -> list[str]:
    """Returns a line for each array of a batch: path, dtype, shape and, for numbers, the range."""
    import keras

    lines = []
    for path, array in keras.tree.flatten_with_path(batch):
        line = f"{'/'.join(map(str, path)) or 'x'}: "
        if array.dtype == object:
            line += f"text {array.shape}"
        else:
            line += f"{array.dtype.name} {array.shape}, "
            line += f"from {float(array.min()):.4g} to {float(array.max()):.4g}"
        lines.append(line)
    return lines


def format_first(data: DataConfig, batch: Batch) -> list[str]:
    """Returns lines with the values of the first example, shortened, and the name of its class."""
    import keras
    import numpy as np

    with own_code.failures_of_class(data, "class_names"):
        names = input_pipelines.class_names(data)
    lines = ["the first example:"]
    for path, array in keras.tree.flatten_with_path(batch):
        shown = _format_text(array[0]) or np.array2string(
            array[0], precision=4, threshold=16, max_line_width=100
        )
        is_class = path == (1,) and array.dtype.kind in "iu" and array[0].size == 1
        label = int(array[0].flat[0]) if is_class and names else -1
        name = f"  ({names[label]})" if names and 0 <= label < len(names) else ""
        text = shown.replace("\n", "\n    ")
        lines.append(f"  {'/'.join(map(str, path)) or 'x'}: {text}{name}")
    return lines


def _format_text(value: Any) -> str:
    """Returns the beginning of a text; "" if the value is not a text."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    if not isinstance(text, str):
        return ""
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ..."


def _format_share(share: float, name: str) -> str:
    return f"{share:.2f} {name}"


def _is_in_blocks(data: DataConfig) -> bool:
    return getattr(data, "space_to_depth", False)


def _cut_to_width(text: str, font: Any, width: int) -> str:
    """Returns the text, truncated with "..." to a width in pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _choose_decoder(data: DataConfig) -> "Callable[[np.ndarray], str]":
    """Returns a function that converts token ids to text; to numbers if no tokenizer is known."""
    path = getattr(data, "tokenizer", None)
    if path:
        tokenizer = packing.load_tokenizer(path, "--config.data.tokenizer")
        return lambda tokens: tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    if texts.has_byte_tokens(data):
        return lambda tokens: bytes(tokens.tolist()).decode(errors="replace")
    return lambda tokens: " ".join(map(str, tokens))
