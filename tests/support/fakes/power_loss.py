"""Power losses: what may be left of a folder, if the machine had lost power at any moment.

    with power_loss.watching(folder) as outages:
        save(folder)
    for outage in outages:
        for survivor in outage.survivors(scratch):
            assert resumes(survivor)

A watched block runs as always, on the real disk. Before each of its operations that a disk may
lose or delay (`os.fsync`, `replace`, `unlink`, ...), and at its end, the state of the folder is
recorded: what the kernel shows, and what was synced. POSIX promises only the latter: the content of
a file as of its last fsync, and the names in a folder as of the folder's. Everything later may be
kept, lost or torn, each change on its own, as in the crash tests of SQLite.

Only changes made by Python's `os` are seen, in this process; writes by other libraries count as
never synced, which is the safe side.
"""

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# An outage before each of these; between two of them, only unsynced data change.
_OPERATIONS = ("fsync", "fdatasync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir")
_ROLLS = 6  # random survivors of an outage, in addition to the two extremes

Names = dict[str, int]  # the inodes of a folder's names


@dataclasses.dataclass(frozen=True)
class Outage:
    """The state of a folder at one moment.

    Attributes:
        before: the operation that would have been next, for messages.
        root: the inode of the folder.
        folders: the names in each folder, by its inode, as the kernel shows them.
        files: the content of each file, by its inode, as the kernel shows it.
        synced_folders, synced_files: the same as of the last fsync.
    """

    before: str
    root: int
    folders: dict[int, Names]
    files: dict[int, bytes]
    synced_folders: dict[int, Names]
    synced_files: dict[int, bytes]

    def survivors(self, scratch: Path) -> Iterator[Path]:
        """Yields folders that the outage may leave; each is removed before the next is made.

        Args:
            scratch: a folder to make them in.
        """
        lost, kept = (lambda *_: 0.0), (lambda *_: 1.0)
        # Nothing that was not synced; every name, but no data; and random mixtures.
        rolls: list[tuple[Callable, Callable]] = [(lost, lost), (kept, lost), (kept, kept)]
        for seed in range(_ROLLS):
            dice = random.Random(f"{self.before} {seed}")
            rolls.append((dice.random, dice.random))
        for number, (names, data) in enumerate(rolls):
            target = scratch / f"survivor-{number}"
            self._make(target, self.root, names, data)
            try:
                yield target
            finally:
                shutil.rmtree(target)

    def _make(self, target: Path, folder: int, names: Callable, data: Callable) -> None:
        target.mkdir()
        now, synced = self.folders.get(folder, {}), self.synced_folders.get(folder, {})
        if folder not in self.folders:  # removed since
            now = {}
        for name in sorted(now | synced):
            inode = now.get(name) if names() > 0.5 else synced.get(name)
            if inode is None:
                continue
            if inode in self.folders or inode in self.synced_folders:
                self._make(target / name, inode, names, data)
            else:
                (target / name).write_bytes(self._content(inode, data()))

    def _content(self, inode: int, luck: float) -> bytes:
        """Returns a file's content: as synced, as written, or torn between the two."""
        synced = self.synced_files.get(inode, b"")
        written = self.files.get(inode, synced)
        if written == synced or luck < 0.2:
            return synced
        if luck > 0.8:
            return written
        pairs = enumerate(zip(synced, written, strict=False))
        shorter = min(len(synced), len(written))
        kept = next((i for i, (a, b) in pairs if a != b), shorter)  # bytes that did not change
        half = kept + (len(written) - kept + 1) // 2
        if luck < 0.4:  # the size arrived before the data
            return written[:kept] + bytes(len(written) - kept)
        if luck < 0.6:  # the first pages arrived
            return written[:half]
        return written[:kept] + bytes(half - kept) + written[half:]  # the last pages arrived


class _Watch:
    """Records outages of a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.RLock()
        self._held: dict[int, int] = {}  # open descriptors by inode, so that no inode is reused
        self.outages: list[Outage] = []
        folders, files = self._state()  # all of it counts as synced
        self._synced_folders, self._synced_files = folders, files

    def record(self, before: str) -> None:
        with self._lock:
            folders, files = self._state()
            for inode in [*self._synced_files, *self._synced_folders]:  # also what has no name now
                if inode in self._synced_files and inode not in files and inode in self._held:
                    files[inode] = _bytes_of(self._held[inode])
            root = os.stat(self._folder).st_ino
            synced = dict(self._synced_folders), dict(self._synced_files)
            self.outages.append(Outage(before, root, folders, files, *synced))

    def synced(self, descriptor: int) -> None:
        """Records that a file or a folder was synced."""
        with self._lock:
            path = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
            if not Path(path).is_relative_to(self._folder):
                return
            found = os.fstat(descriptor)
            self._hold(f"/proc/self/fd/{descriptor}", found.st_ino)
            if stat.S_ISDIR(found.st_mode):
                self._synced_folders[found.st_ino] = _names_in(path)
            else:
                self._synced_files[found.st_ino] = _bytes_of(self._held[found.st_ino])

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def _state(self) -> tuple[dict[int, Names], dict[int, bytes]]:
        folders: dict[int, Names] = {}
        files: dict[int, bytes] = {}
        for place, _, names in os.walk(self._folder):
            with contextlib.suppress(FileNotFoundError):  # another thread removes it
                inode = os.stat(place).st_ino
                self._hold(place, inode)
                folders[inode] = _names_in(place)
            for name in names:
                path = os.path.join(place, name)
                with contextlib.suppress(FileNotFoundError):
                    inode = os.stat(path).st_ino
                    self._hold(path, inode)
                    files[inode] = _bytes_of(self._held[inode])
        return folders, files

    def _hold(self, path: str, inode: int) -> None:
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)


@contextlib.contextmanager
def watching(folder: str | os.PathLike[str]) -> Iterator[list[Outage]]:
    """Records the outages within the block; the list that it yields is complete after the block.

    Args:
        folder: exists; what it holds at first counts as synced.
    """
    watch = _Watch(Path(folder).resolve())
    with pytest.MonkeyPatch.context() as patch:
        for operation in _OPERATIONS:
            patch.setattr(os, operation, _watched(watch, operation, getattr(os, operation)))
        try:
            yield watch.outages
        finally:
            patch.undo()
            watch.record("the end")
            watch.close()


def _watched(watch: _Watch, operation: str, function: Callable) -> Callable:
    number = itertools.count(1)

    def operate(*args: Any, **keywords: Any) -> Any:
        watch.record(f"{operation} {next(number)} ({args[0]})")
        result = function(*args, **keywords)
        if operation in ("fsync", "fdatasync"):
            watch.synced(args[0] if isinstance(args[0], int) else args[0].fileno())
        return result

    return operate


def _names_in(folder: str) -> Names:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


def _bytes_of(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
