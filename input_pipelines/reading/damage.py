"""Finds unreadable records in files, and the reasons."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.tensors import Tensor
from tftpu.storage.buckets import BucketError


class Damage(NamedTuple):
    """The records of a file that cannot be used.

    Attributes:
        record: the number of the first record that cannot be read; the record count if all can be
            read.
        reason: why this record, and each record after it, cannot be read.
        empty: the numbers of empty records, which no reader can use.
    """

    record: int
    reason: str
    empty: frozenset[int]

    def describe_record(self, record: int) -> str:
        """Returns what is wrong with a record, as the end of a sentence; "" if it is readable."""
        if record in self.empty:
            return "is empty: the program that wrote the file stored no data in it"
        return f"cannot be read: {self.reason}" if record >= self.record else ""


def scan_file(path: str, compression: str) -> Damage:
    """Reads a file up to the first record that cannot be read, and returns its damage."""
    number, empty = 0, []
    try:
        for _, record in tfrecord.read_records(path, compression):
            if not record:
                empty.append(number)
            number += 1
    except BucketError:
        raise
    except UserError as error:
        return Damage(number, str(error).removesuffix("."), frozenset(empty))
    return Damage(number, "the file ends before it", frozenset(empty))


def count_readable(path: Tensor, position: Tensor, count: Tensor) -> Tensor:
    """Calls `tfrecord.count_readable` with tensors, in this process; returns (), int64."""

    def count_values(path: bytes, position: np.int64, count: np.int64) -> np.int64:
        return np.int64(tfrecord.count_readable(path.decode(), int(position), int(count)))

    found = tf.numpy_function(count_values, [path, position, count], tf.int64)
    return tf.ensure_shape(found, ())


def check_lengths(paths: Sequence[str], counts: Sequence[int]) -> None:
    """Raises `UserError` for files in which a record states a length beyond the end of the file.

    Args:
        paths: the paths of local files that are not compressed.
        counts: how many records of each file are checked, from its beginning.

    Raises:
        UserError: there is such a record; the message names it.
    """
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tfrecord.count_readable, paths, [0] * len(paths), counts))
    for path, count, good in zip(paths, counts, found):
        if good < count:
            raise UserError(
                f"{path}: record {good} is corrupt: the file ends inside it. Restore the file."
            )


def ignore_failures(records: tf.data.Dataset, count: Tensor) -> tf.data.Dataset:
    """Returns `count` pairs (record, meaningless number), with "" for each record that is missing.

    The zipped range limits the attempts to `count` + 1. With `ignore_errors` alone, a file that
    cannot be opened would be retried forever.
    """
    attempts = tf.data.Dataset.zip(records, tf.data.Dataset.range(count + 1))
    lost: Any = tf.data.Dataset.from_tensors(("", tf.constant(-1, tf.int64))).repeat()
    return attempts.ignore_errors(log_warning=False).concatenate(lost).take(count)


def probe_file(path: Tensor) -> tf.data.Dataset:
    """Returns a dataset of one element; reading it raises an error if the file cannot be opened."""
    first = tf.data.FixedLengthRecordDataset(path, record_bytes=1, buffer_size=1)
    end: Any = tf.data.Dataset.from_tensors("")
    return first.concatenate(end).take(1)
