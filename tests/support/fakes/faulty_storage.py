"""Storage whose nth operation fails, in place of the real one of disks and of buckets."""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator

import pytest

from tftpu.storage import buckets, files

_READING = ("read", "exists", "list", "reading", "listing", "looking at")


class KilledError(BaseException):
    """Simulates the end of the process: nothing happens after it."""


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
            return operation in ("mkdir", "open", "write", "fsync", "writing")
        if self.how == "EROFS":
            return operation not in _READING
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
        request = buckets._request

        def request_or_fail(doing: str, uri: str, function: Callable):
            return faulty(doing, uri, functools.partial(request, doing, uri, function))

        patch.setattr(buckets, "_request", request_or_fail)
        yield faulty
