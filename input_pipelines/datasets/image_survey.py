"""Counts the images of each class in a folder or an index, and finds damaged files."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tftpu.errors import counted
from tftpu.input_pipelines.augment import decode
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.reading.image_files import ImageFiles
from tftpu.input_pipelines.reading.listing import decode_path
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import StreamedImages

_SHOWN = 20  # maximum number of classes that a line names
_FEW = 100  # with fewer images, each changes the accuracy by more than 0.01
MOST = 20_000  # maximum number of images decoded per split, which takes seconds on a few cores


def count_classes(found: ImageFiles) -> dict[str, int]:
    """Returns the number of images of each class, by its name or id, in the order of the ids."""
    counts = Counter(image.label for image in found.images)
    names = found.class_names or [str(number) for number in range(found.num_classes)]
    return {name: counts[number] for number, name in enumerate(names)}


def describe_classes(splits: Mapping[str, ImageFiles]) -> list[str]:
    """Returns a line for each split with the number of its images, in total and by class."""
    lines = []
    for split, found in splits.items():
        counts = count_classes(found)
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        if len(counts) > _SHOWN:
            least, most = min(counts.values()), max(counts.values())
            listed = f"{least:,} to {most:,} of each of {len(counts):,} classes"
        lines.append(f"{split}: {counted(len(found.images), 'image')}: {listed}")
    return lines


def describe_shards(data: "StreamedImages") -> list[str]:
    """Returns lines with each split's number of examples and the classes; [] without a manifest."""
    folder = data.data_dir or ""
    if not files.exists(files.join(folder, manifest.NAME)):
        return []
    found = manifest.read(folder)
    counts = [
        f"{split}: {counted(found.count_examples(split), 'example')}" for split in found.splits
    ]
    names = [str(name) for name in data.classes or found.about.get("classes") or ()]
    others = f" and {len(names) - _SHOWN:,} others" if len(names) > _SHOWN else ""
    classes = f"{counted(len(names), 'class')}: {', '.join(names[:_SHOWN])}{others}"
    return ["; ".join(counts), *([classes] if names else [])]


def count_evaluation(data: "StreamedImages") -> int | None:
    """Returns the number of evaluation examples; None unless a TFRecord manifest has the split."""
    folder = data.data_dir or ""
    if data.format != "tfrecord" or not files.exists(files.join(folder, manifest.NAME)):
        return None
    found = manifest.read(folder)
    return found.count_examples(data.eval_split) if data.eval_split in found.splits else None


def describe_few(split: str, examples: int | None) -> str:
    """Returns a warning if a split is so small that one image changes its accuracy a lot; or ""."""
    if not examples or examples >= _FEW:
        return ""
    images = counted(examples, "image")
    step = f"{1 / examples:.2g}"
    return f"{split} has {images}, so one that is right or wrong changes the accuracy by {step}"


def find_imbalance(splits: Mapping[str, ImageFiles]) -> list[str]:
    """Returns lines about splits that have no images or lack a class.

    Also about those that have one class ten times as often as another.
    """
    lines = []
    for split, found in splits.items():
        if not found.images:
            lines.append(f"{split} has no images")
            continue
        counts = count_classes(found)
        absent = [name for name, count in counts.items() if not count]
        if absent:
            others = f" and {len(absent) - _SHOWN:,} others" if len(absent) > _SHOWN else ""
            lines.append(f"{split} has no images of {', '.join(absent[:_SHOWN])}{others}")
        counts = {name: count for name, count in counts.items() if count}
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        if counts[most] >= 10 * counts[least]:
            lines.append(
                f"{split} has {counts[most]:,} images of {most}, and {counts[least]:,} of {least}: "
                "the accuracy says little about the rare class"
            )
    return lines


def sample_paths(found: ImageFiles) -> list[str]:
    """Returns the paths of the images of a split, `MOST` of them at most, evenly spread."""
    step = max(1, -(-len(found.images) // MOST))
    return [image.path for image in found.images[::step]]


def find_damaged(paths: Sequence[str]) -> dict[str, str]:
    """Decodes images; returns the path of each that cannot be decoded, with the reason."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = list(pool.map(lambda path: decode.explain_failure(files.read(path)), paths))
    return {decode_path(path): why for path, why in zip(paths, reasons) if why}
