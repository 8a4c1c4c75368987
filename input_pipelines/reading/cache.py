"""A read-through cache of a bucket's files on local disk, shared by the processes of a host.

    FOLDER/<key>-<bytes>         a file, whole and checked; its time is that of its last use
           <key>-<bytes>.part    one on its way; it counts as if it were there already
           <key>.lock            held, shared, by who reads it; alone, by who fetches or removes it
           lock                  held while room is made

The locks are the operating system's: they end with their process, however that ends, and what a
killed one left behind is removed by the next that needs the room.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tftpu.errors import UserError
from tftpu.input_pipelines.sources import Streamed
from tftpu.storage import buckets, files
from tftpu.storage.buckets import Stored

PATIENCE = 60.0  # seconds to wait for files to be let go


def of(data: Streamed) -> "Cache | None":
    """The cache that a data set asks for with `cache_dir`.

    Raises:
        UserError: its shards are not in a bucket.
    """
    if not data.cache_dir:
        return None
    if not files.is_remote(data.data_dir or ""):
        raise UserError(
            f"data.cache_dir is for shards in a bucket, and data.data_dir is {data.data_dir!r}: "
            "leave it out."
        )
    return Cache(data.cache_dir, int(data.cache_gb * 2**30))


class Cache:
    """Files of buckets, kept on local disk up to a size; the least recently used go first.

    Args:
        folder: local; made if it is not there.
        limit: bytes of all files together.
    """

    def __init__(self, folder: str | os.PathLike, limit: int):
        self.folder = Path(folder)
        self.limit = limit
        self._checked = set()  # keys whose bytes this process has compared with their checksum
        self._held = {}  # how to let go what `hold` gave out, by its reader
        self._holding = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def file(self, uri: str, expected: Stored) -> Iterator[Path]:
        """A local copy of a file of a bucket, which stays while the block runs.

        Another process that wants the same file meanwhile waits for this one's download.

        Args:
            uri: `gs://BUCKET/NAME`.
            expected: size and checksum by the manifest; a file that changed is fetched anew.

        Raises:
            UserError: the limit is too small for what is in use at once; or the file is not what
                was expected, or cannot be downloaded.
        """
        key = hashlib.sha256(f"{uri} {expected.crc32c}".encode()).hexdigest()[:32]
        path = self.folder / f"{key}-{expected.bytes}"
        with open(self.folder / f"{key}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            while not self._is_whole(key, path, expected):
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self._is_whole(key, path, expected):
                    self._fetch(uri, path, expected)
                    self._checked.add(key)
                # Between one lock and the other the file may be removed: hence the loop.
                fcntl.flock(lock, fcntl.LOCK_SH)
            os.utime(path)
            yield path

    def hold(self, uri: str, expected: Stored, reader: int) -> Path:
        """A local copy of a file, as by `file`, until the same reader asks for another.

        Args:
            uri, expected: as of `file`.
            reader: the number of one who reads a file at a time; those of other numbers may read
                at the same time.
        """
        with self._holding:
            before = self._held.pop(reader, None)
        if before:
            before.close()  # before the next is waited for: readers never wait for one another
        held = contextlib.ExitStack()
        path = held.enter_context(self.file(uri, expected))
        with self._holding:
            self._held[reader] = held
        return path

    def size(self) -> int:
        """Bytes of all files that are there or on their way."""
        return sum(_bytes(path) for path in self._files())

    def _is_whole(self, key: str, path: Path, expected: Stored) -> bool:
        if not path.exists():
            return False
        if key not in self._checked:
            if buckets.checksum(path)[:2] != expected[:2]:
                return False
            self._checked.add(key)
        return path.stat().st_size == expected.bytes

    def _fetch(self, uri: str, path: Path, expected: Stored) -> None:
        path.unlink(missing_ok=True)  # a copy that does not match its checksum
        part = path.with_name(path.name + ".part")
        end = time.monotonic() + PATIENCE
        while not self._reserve(part, expected.bytes):
            if time.monotonic() > end:
                raise UserError(
                    f"The cache in {self.folder} may hold {self.limit:,} bytes. {uri} needs "
                    f"{expected.bytes:,}, and {self.size():,} are in use: give the cache more "
                    "room, or read fewer files at once."
                )
            time.sleep(0.05)
        try:
            buckets.fetch_into(uri, part, expected)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def _reserve(self, part: Path, needed: int) -> bool:
        """Removes files that nobody uses until so many bytes are free, and takes these."""
        with open(self.folder / "lock", "a") as whole:
            fcntl.flock(whole, fcntl.LOCK_EX)
            part.unlink(missing_ok=True)
            used = self.size()
            for path in sorted(self._files(), key=_last_use):
                if used + needed <= self.limit:
                    break
                name = f"{path.name.partition('-')[0]}.lock"
                lock = open(self.folder / name, "a")  # noqa: SIM115
                with lock, contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                    used -= _bytes(path)
            if used + needed > self.limit:
                return False
            part.touch()
            return True

    def _files(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if "-" in path.name]


def _bytes(path: Path) -> int:
    return int(path.name.partition("-")[2].removesuffix(".part"))


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # its download has just ended
        return float("inf")
