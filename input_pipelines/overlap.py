"""Counts the evaluation examples that are also in the training split.

Each split is read for a few seconds at most, so the true count may be higher.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tftpu.errors import counted
from tftpu.input_pipelines.reading.image_files import ImageFiles
from tftpu.storage import files

_MOST = 50_000  # maximum number of examples compared per split
_SECONDS = 3.0  # time limit for reading a split


def describe_images(trained: ImageFiles, evaluated: ImageFiles) -> str:
    """Returns a warning about evaluation images that equal training images; "" without any.

    Only files whose size occurs in both splits are read.
    """
    sizes = {image.bytes for image in trained.images} & {i.bytes for i in evaluated.images}
    sizes.discard(0)  # empty files are damaged, not repeated images
    alike = [[i for i in split.images if i.bytes in sizes] for split in (trained, evaluated)]
    known, looked_at = ((_digest(files.read(i.path)) for i in images) for images in alike)
    return _describe(known, looked_at, len(evaluated.images))


def describe_inputs(training: Iterable[Any], evaluation: Iterable[Any]) -> str:
    """Returns a warning about evaluation examples whose inputs are in the training split, or "".

    Args:
        training: the batches of an epoch, as NumPy arrays.
        evaluation: the batches of the evaluation split, as NumPy arrays.
    """
    return _describe(_iterate_inputs(training), _iterate_inputs(evaluation))


def _describe(training: Iterable[bytes], evaluation: Iterable[bytes], count: int = 0) -> str:
    """Returns a warning about digests in both splits, or ""; `count`: evaluation examples, or 0."""
    (known, all_known), (looked_at, all_looked_at) = _collect(training), _collect(evaluation)
    trained = set(known)
    found = sum(digest in trained for digest in looked_at)
    if not found:
        return ""
    least = "" if all_known and all_looked_at else "At least "
    first = "" if count or all_looked_at else "the first "
    return (
        f"{least}{found:,} of {first}{counted(count or len(looked_at), 'evaluation example')} "
        f"{'is' if found == 1 else 'are'} also in the training split, so the model may just "
        "remember them: leave repeated examples out of one of the splits"
    )


def _collect(digests: Iterable[bytes]) -> tuple[list[bytes], bool]:
    """Returns the first digests, limited in time and number, and whether these are all of them."""
    due, found = time.monotonic() + _SECONDS, list[bytes]()
    for digest in digests:
        if len(found) >= _MOST or time.monotonic() > due:
            return found, False
        found.append(digest)
    return found, True


def _iterate_inputs(batches: Iterable[Any]) -> Iterator[bytes]:
    import keras

    for batch in batches:
        parts = keras.tree.flatten(keras.utils.unpack_x_y_sample_weight(batch)[0])
        for row in zip(*parts):
            yield _digest(b"\0".join(map(_to_bytes, row)))


def _to_bytes(part: Any) -> bytes:
    return part if isinstance(part, bytes) else np.asarray(part).tobytes()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
