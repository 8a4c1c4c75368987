"""Storage whose nth operation fails, in place of the real one in `tftpu.storage.files`."""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

from tftpu.storage import files


class KilledError(BaseException):
    """Simulates the end of the process: nothing happens after it."""


def like_a_bucket(upload: Callable, path: str, parts) -> None:
    """Makes TensorFlow's in-memory file system create folders and replace files, as buckets do."""
    tf.io.gfile.makedirs(os.path.dirname(path))
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)
    upload(path, parts)


class Storage:
    """A storage that counts operations and makes some fail.

    Args:
        fails: the number of the first operation that fails; 0: none.
        how: "EIO": only that one fails; "ENOSPC": that and every later one that needs space;
            "EROFS": that and every later one that changes anything; "kill": nothing happens from
            there on; "torn": the same, after half of the data is written.
    """

    def __init__(self, fails: int = 0, how: str = "EIO"):
        self.fails, self.how = fails, how
        self.operations: list[str] = []

    def __call__(self, operation: str, path: str, function: Callable, *args, **keywords):
        self.operations.append(operation)
        if operation == "_upload":
            function = functools.partial(like_a_bucket, function)
        count = len(self.operations)
        if not self.fails or count < self.fails or not self._concerns(operation, count):
            return function(*args, **keywords)
        if self.how == "torn" and operation == "write" and count == self.fails:
            file, data = args
            function(file, data[: len(data) // 2])
        if self.how in ("kill", "torn"):
            raise KilledError
        number = getattr(errno, self.how)
        raise OSError(number, os.strerror(number), str(path))

    def _concerns(self, operation: str, count: int) -> bool:
        if self.how == "EIO":
            return count == self.fails
        if self.how == "ENOSPC":
            return operation in ("mkdir", "open", "write", "fsync", "_upload")
        if self.how == "EROFS":
            return operation not in ("read", "exists", "list", "_download", "file_exists_v2")
        return True

    @property
    def reached(self) -> bool:
        """True once the failing operation was reached."""
        return 0 < self.fails <= len(self.operations)


@contextlib.contextmanager
def storage(fails: int = 0, how: str = "EIO") -> Iterator[Storage]:
    """Replaces the real storage within the block."""
    faulty = Storage(fails, how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_operate", faulty)
        yield faulty
