"""A read-through cache of a bucket's files on local disk, shared by the processes of a host.

    FOLDER/<key>-<bytes>         a complete, checked file; its mtime is the time of its last use
           <key>-<bytes>.part    a download in progress; it counts with its final size
           <key>.lock            held shared by readers, exclusively to remove the file
           <key>.download        held while downloading the file
           lock                  held while making room

The locks are the operating system's and are released when their process ends for any reason. The
next process that needs the room removes the leftovers of a killed one.
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
from tftpu.input_pipelines.reading.streamed import Streamed
from tftpu.storage import buckets, files
from tftpu.storage.buckets import Stored

PATIENCE = 60.0  # seconds to wait for other readers to release files


def from_data(data: Streamed) -> "Cache | None":
    """Returns the cache in a data set's `cache_dir`, or None if that is not set.

    Raises:
        UserError: the data set's shards are not in a bucket.
    """
    if not data.cache_dir:
        return None
    if not files.is_remote(data.data_dir or ""):
        raise UserError(
            "data.cache_dir keeps local copies of a bucket's shards, but data.data_dir is "
            f"{data.data_dir!r}: leave data.cache_dir out."
        )
    return Cache(data.cache_dir, int(data.cache_gb * 2**30))


class Cache:
    """Local copies of bucket files up to a total size; the least recently used are removed first.

    Args:
        folder: a local folder, which is created if it does not exist.
        limit: total size in bytes.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int):
        self.folder = Path(folder)
        self.limit = limit
        self._checked: set[str] = set()  # keys of files whose checksum this process has verified
        self._held: dict[int, contextlib.ExitStack] = {}  # by reader: keeps the file it uses
        self._holding = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def local_copy(self, uri: str, expected: Stored) -> Iterator[Path]:
        """Yields the path of a local copy of a bucket file, kept until the `with` block ends.

        Another process that needs the same file waits for this download.

        Args:
            uri: `gs://BUCKET/NAME`.
            expected: the size and the checksum in the manifest. A copy that does not match is
                downloaded again.

        Raises:
            UserError: the limit is too small for the files in use at once, or the file cannot be
                downloaded or differs from the expected content.
        """
        key = hashlib.sha256(f"{uri} {expected.crc32c}".encode()).hexdigest()[:32]
        path = self.folder / f"{key}-{expected.bytes}"
        with open(self.folder / f"{key}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)  # from here on nobody removes the file
            if not self._is_whole(key, path, expected):
                # A separate lock for the download: `hold` may keep the shared one for hours, and a
                # second reader would wait that long for an exclusive lock on the same file.
                with open(self.folder / f"{key}.download", "a") as download:
                    fcntl.flock(download, fcntl.LOCK_EX)
                    if not self._is_whole(key, path, expected):
                        self._fetch(uri, path, expected)
                        self._checked.add(key)
            os.utime(path)
            yield path

    def hold(self, uri: str, expected: Stored, reader: int) -> Path:
        """Returns the path of a local copy, kept until the same reader requests another file.

        Args:
            uri, expected: as for `local_copy`.
            reader: number of the reader. A reader uses one file at a time; different readers may
                use files at the same time.
        """
        with self._holding:
            before = self._held.pop(reader, None)
        if before:
            # Released before waiting for the next file, so that readers never deadlock.
            before.close()
        held = contextlib.ExitStack()
        path = held.enter_context(self.local_copy(uri, expected))
        with self._holding:
            self._held[reader] = held
        return path

    def measure_size(self) -> int:
        """Returns the total size of all files in bytes, including downloads in progress."""
        return sum(_parse_size(path) for path in self._list_files())

    def _is_whole(self, key: str, path: Path, expected: Stored) -> bool:
        if not path.exists():
            return False
        if key not in self._checked:
            if buckets.describe_file(path)[:2] != expected[:2]:
                return False
            self._checked.add(key)
        return path.stat().st_size == expected.bytes

    def _fetch(self, uri: str, path: Path, expected: Stored) -> None:
        path.unlink(missing_ok=True)  # removes a copy that does not match its checksum
        part = path.with_name(path.name + ".part")
        end = time.monotonic() + PATIENCE
        while not self._reserve_room(part, expected.bytes):
            if time.monotonic() > end:
                raise UserError(
                    f"The cache in {self.folder} may hold {self.limit:,} bytes. {uri} needs "
                    f"{expected.bytes:,} bytes, but the runs that share the cache use "
                    f"{self.measure_size():,}: raise data.cache_gb, or leave data.cache_dir out."
                )
            time.sleep(0.05)
        try:
            buckets.fetch_into(uri, part, expected)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def _reserve_room(self, part: Path, needed: int) -> bool:
        """Makes room for a download by removing unused files; returns whether there is enough."""
        with open(self.folder / "lock", "a") as whole:
            fcntl.flock(whole, fcntl.LOCK_EX)
            part.unlink(missing_ok=True)
            used = self.measure_size()
            for path in sorted(self._list_files(), key=_read_last_use):
                if used + needed <= self.limit:
                    break
                name = f"{path.name.partition('-')[0]}.lock"
                lock = open(self.folder / name, "a")  # noqa: SIM115
                with lock, contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                    used -= _parse_size(path)
            if used + needed > self.limit:
                return False
            part.touch()
            return True

    def _list_files(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if "-" in path.name]


def _parse_size(path: Path) -> int:
    return int(path.name.partition("-")[2].removesuffix(".part"))


def _read_last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # its download has just ended, and the file was renamed
        return float("inf")
