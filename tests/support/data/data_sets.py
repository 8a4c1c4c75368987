"""Small data sets of shards for tests."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from tftpu.input_pipelines.formats import example_proto, manifest, tfrecord
from tftpu.input_pipelines.formats.manifest import Feature, Manifest

IMAGES = {"image": Feature("string", (), "image"), "label": Feature("int32", num_classes=10)}


def shards(folder: Path, features: dict, splits: dict[str, list[list]], compression="") -> Manifest:
    """Writes a data set of examples, given by split as a list for each shard."""
    written = {}
    for split, lists in splits.items():
        written[split] = tuple(
            tfrecord.write(
                str(folder / f"{split}-{number:05d}"),
                [
                    e if isinstance(e, bytes) else example_proto.encode(e, features)
                    for e in examples
                ],
                compression,
            )
            for number, examples in enumerate(lists)
        )
    data = Manifest(str(folder), features, written, compression)
    manifest.write(data)
    return data


def picture(value: int, height: int = 12, width: int = 16, kind: str = "JPEG") -> bytes:
    """Returns an image of one grey level."""
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), value, np.uint8)).save(file, kind, quality=95)
    return file.getvalue()


def pictures(count: int) -> list[dict]:
    """Returns examples; example i shows the grey level i, and its class is i % 10."""
    return [{"image": picture(i), "label": i % 10} for i in range(count)]


def split(examples: list, *sizes: int) -> list[list]:
    """Cuts a list into consecutive parts of these sizes."""
    ends = np.cumsum(sizes)
    return [examples[end - size : end] for end, size in zip(ends, sizes)]
