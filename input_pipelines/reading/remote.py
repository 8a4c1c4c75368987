"""Records of a file in a bucket, read by this process and not by TensorFlow's reader.

TensorFlow's reader allocates the length that a record states before it reads, and crashes if the
memory is too small. The lengths in a local file can be checked first (`damage.count_readable`), but
in a bucket that would read the file twice. So each length is compared with the rest of the file
while it is read.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.tensors import Tensor

_TOGETHER = 1 << 20  # bytes of records per call: a call's overhead costs as much as reading 50 KB


def read_records(path: Tensor, position: Tensor, count: Tensor) -> tf.data.Dataset:
    """Returns the records of a bucket's file from a position on, read by this process.

    The records end before the first one that cannot be read, for any reason.

    Args:
        path: the path of the file, which is not compressed, (), string.
        position: the position of the first record in the file, in bytes, (), int64.
        count: the number of wanted records, (), int64.
    """
    found = tf.data.Dataset.from_generator(
        _iterate_pieces,
        output_signature=tf.TensorSpec((None,), tf.string),
        args=(path, position, count),
    )
    return found.unbatch()


def _iterate_pieces(path: bytes, position: np.int64, count: np.int64) -> Iterator[np.ndarray]:
    """Yields the records of a file in arrays (n,) of bytes objects."""
    piece: list[bytes] = []
    size, left = 0, int(count)
    reader = tfrecord.read_records(path.decode(), first=int(position))
    while left:
        record = _read_next(reader)
        if record is None:
            break
        piece.append(record)
        size, left = size + len(record), left - 1
        if size >= _TOGETHER:
            yield np.array(piece, object)
            piece, size = [], 0
    if piece:
        yield np.array(piece, object)


def _read_next(reader: Iterator[tuple[int, bytes]]) -> bytes | None:
    """Returns the next record, or None at the end or if it cannot be read."""
    failures: Any = (UserError, OSError, tf.errors.OpError)
    try:
        found = next(reader, None)
    except failures:
        return None  # `Shards.explain_loss` reads the file again to find the reason
    return found and found[1]
