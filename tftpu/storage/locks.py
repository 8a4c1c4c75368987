"""Locks of workdirs: one run writes to a workdir at a time.

    on a disk                 `.lock`, locked by the kernel until the process ends
    on a disk without locks   `.lock-beats`, with the owner's beats
    in a bucket               `.lease`, with the owner's beats; replaced only if unchanged

A lock without the kernel's help is renewed every `BEAT` seconds, and broken after `EXPIRES` seconds
without a renewal. An owner that finds its lock gone or changed has lost it: `check` then fails.
"""

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tftpu.errors import UserError
from tftpu.storage import files, owner
from tftpu.storage.lease import Lease
from tftpu.storage.owner import LockLostError, Owner, build_locked_error, build_lost_error, warn_of

_log = logging.getLogger(__name__)

_LOCK, _BEATS = ".lock", ".lock-beats"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO, errno.EPERM)


class WorkdirLock(Protocol):
    """A lock that this process holds."""

    def check(self) -> None:
        """Raises LockLostError if the lock is lost, or OSError if that cannot be determined."""

    def renew(self) -> None:
        """Shows that the owner is alive; raises the errors of `check`."""

    def release(self) -> None:
        """Releases the lock."""


_held: dict[str, WorkdirLock] = {}  # the locks of this process, by the absolute path of the workdir


@contextlib.contextmanager
def locked(workdir: files.StrPath) -> Iterator[None]:
    """Creates a workdir and locks it for one run until the end of the `with` block.

    Such blocks of one process may be nested. A workdir on disk that is new and still empty at the
    end, for example because the run was rejected, is removed.

    Raises:
        LockedError: another process holds the lock.
        UserError: the workdir cannot be written, or is in a place that cannot be locked.
    """
    place = _place(workdir)
    if place in _held:
        yield
        return
    files.check_folder("workdir", str(workdir))
    is_new = not files.is_remote(workdir) and not Path(workdir).exists()
    lock = _acquire_lock(workdir)
    over = threading.Event()
    beats = threading.Thread(
        target=_renew_until, args=(workdir, lock, over), name="lock", daemon=True
    )
    beats.start()
    _held[place] = lock
    try:
        yield
    finally:
        del _held[place]
        over.set()
        beats.join(timeout=5.0)  # does not wait longer for a bucket that does not answer
        with contextlib.suppress(OSError, UserError):
            lock.release()
        if is_new:
            files.remove_folder_of(workdir, _LOCK)


def check_lock(workdir: files.StrPath) -> None:
    """Checks that this process still holds the lock of a workdir, if it ever acquired it.

    Raises:
        LockLostError: the workdir was deleted or replaced, or another process took it over.
        OSError: the lock could not be renewed for so long that another process may hold it.
    """
    lock = _held.get(_place(workdir))
    if lock is not None:
        lock.check()


def find_lock(workdir: files.StrPath) -> object:
    """Returns this process's lock of a workdir, or None; nested `locked` blocks share one lock."""
    return _held.get(_place(workdir))


def is_locked(workdir: files.StrPath) -> bool | None:
    """Returns whether a process holds the kernel's lock of a workdir; None if it is unknown."""
    if files.is_remote(workdir):
        return None
    try:
        with open(Path(workdir) / _LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    beats = Owner.parse(_read_content(Path(workdir) / _BEATS) or b"")
    return None if beats and not beats.released and not beats.is_dead else False


def find_holder(workdir: files.StrPath) -> Owner | None:
    """Returns the process that holds the kernel's lock of a workdir; None if none is known."""
    if not is_locked(workdir):
        return None
    return Owner.parse(_read_content(Path(workdir) / _LOCK) or b"")


def _place(workdir: files.StrPath) -> str:
    return str(workdir).rstrip("/") if files.is_remote(workdir) else os.path.abspath(workdir)


def _renew_until(workdir: files.StrPath, lock: WorkdirLock, over: threading.Event) -> None:
    """Renews a lock until it is released or lost."""
    warned = False
    while not over.wait(owner.BEAT):
        try:
            lock.renew()
            warned = False
        except LockLostError as error:
            _log.warning("%s", error)
            return
        except (OSError, UserError) as error:
            if not warned:
                _log.warning("The lock of %s cannot be renewed: %s", workdir, error)
            warned = True


def _acquire_lock(workdir: files.StrPath) -> WorkdirLock:
    """Acquires and returns the lock of a workdir."""
    if files.is_remote(workdir):
        return Lease(str(workdir))
    try:
        files.make_folder(workdir)
        return _lock_folder(Path(workdir).absolute())
    except OSError as error:
        raise UserError(
            f"The folder '{workdir}' cannot be written ({error.strerror or error}): choose another."
        ) from error


def _lock_folder(workdir: Path) -> WorkdirLock:
    """Acquires the lock of a folder on a disk: the kernel's, or a lock with heartbeats."""
    descriptor = os.open(workdir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        try:
            known = Owner.parse(os.pread(descriptor, 4096, 0))
        finally:
            os.close(descriptor)
        raise build_locked_error(workdir, known) from error
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning(
            "The system cannot lock %s (%s). Instead, its file %s is updated every %.0f s to "
            "show that this run is alive.",
            workdir,
            error.strerror,
            _BEATS,
            owner.BEAT,
        )
        lock: _KernelLock | _Beats = _Beats(workdir)
        other = workdir / _LOCK
    else:
        lock = _KernelLock(workdir, descriptor)
        other = workdir / _BEATS
    # A run on another machine may use the other kind of lock. Each checks for the other's file
    # after writing its own, so that at most one of them continues.
    try:
        if owner.is_alive(lambda: _read_content(other) or None, warn_of(workdir)):
            raise build_locked_error(workdir, Owner.parse(_read_content(other) or b""))
    except BaseException:  # leaves no lock behind on a disk that fails
        lock.release()
        raise
    return lock


class _KernelLock:
    """A file lock of the kernel, which releases it when the process ends for any reason.

    Args:
        workdir: the locked folder.
        descriptor: the descriptor of the locked file.
    """

    def __init__(self, workdir: Path, descriptor: int):
        self._workdir = workdir
        self._descriptor = descriptor
        self._owner = Owner.from_this_process(exclusive=True)
        try:  # a machine that cannot see the kernel's lock reads this file instead
            _write_owner(descriptor, self._owner)
        except BaseException:
            os.close(descriptor)
            raise

    def check(self) -> None:
        try:
            found = os.stat(self._workdir / _LOCK)
        except FileNotFoundError:
            raise build_lost_error(self._workdir, f"or its file {_LOCK} was deleted") from None
        ours = os.fstat(self._descriptor)
        if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
            raise build_lost_error(self._workdir, "was replaced by another folder of that name")

    def renew(self) -> None:
        self.check()
        self._owner = self._owner.count_beat()
        self._write(self._owner)

    def release(self) -> None:
        self._write(dataclasses.replace(self._owner, released=True))
        os.close(self._descriptor)

    def _write(self, who: Owner) -> None:
        with contextlib.suppress(OSError):  # on a full disk, the lock keeps its earlier text
            _write_owner(self._descriptor, who)


class _Beats:
    """A lock for disks without locks: a file that only one process can create, with heartbeats."""

    def __init__(self, workdir: Path):
        self._workdir = workdir
        self._path = workdir / _BEATS
        self._owner = Owner.from_this_process(exclusive=False)
        # Heartbeats go through the descriptor of this file, even after it is renamed or removed.
        while (descriptor := self._create_file(self._path)) is None:
            self._break()
        self._descriptor = descriptor

    def check(self) -> None:
        content = _read_content(self._path)
        if content is None:
            raise build_lost_error(self._workdir, f"or its file {_BEATS} was deleted")
        found = Owner.parse(content)
        if found is None or found.key != self._owner.key:
            raise build_lost_error(self._workdir, f"was taken over by {found or 'another process'}")

    def renew(self) -> None:
        self.check()
        self._owner = self._owner.count_beat()
        _write_owner(self._descriptor, self._owner)

    def release(self) -> None:
        try:
            _write_owner(self._descriptor, dataclasses.replace(self._owner, released=True))
        except OSError:
            self.check()  # raises, and keeps the file, if it belongs to another owner
            os.unlink(self._path)
        finally:
            os.close(self._descriptor)

    def _create_file(self, path: Path) -> int | None:
        """Creates a file that names this owner, atomically, and opens it; None if it exists."""
        own = self._path.with_name(f"{_BEATS}.{self._owner.key}")
        descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write_owner(descriptor, self._owner)
            os.link(own, path)
        except FileExistsError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            _remove_file(own)
        return descriptor

    def _break(self) -> None:
        """Removes the lock of a dead owner; raises LockedError if the owner is alive."""
        seen = self._find_dead(self._path)
        if seen is None:
            return
        known = Owner.parse(seen)
        # Several processes may see the expired lock. They remove it one at a time, and never a new
        # lock.
        turn = self._path.with_name(f"{_BEATS}.{known.key if known else 'unknown'}.broken")
        descriptor = self._create_file(turn)
        if descriptor is None:
            if self._find_dead(turn) is not None:
                _remove_file(turn)
            return
        try:
            if _read_content(self._path) == seen:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
        finally:
            os.close(descriptor)
            _remove_file(turn)

    def _find_dead(self, path: Path) -> bytes | None:
        """Returns a dead owner's lock, or None if it is gone; raises LockedError if it is alive."""
        seen: list[bytes | None] = []

        def look() -> bytes | None:
            seen.append(_read_content(path))
            return seen[-1]

        if owner.is_alive(look, warn_of(self._workdir)):
            raise build_locked_error(self._workdir, Owner.parse(seen[-1] or b""))
        return seen[-1]


def _read_content(path: Path) -> bytes | None:
    """Returns the content of a file; None if the file does not exist."""
    try:
        return files.read(path)
    except FileNotFoundError:
        return None


def _remove_file(path: Path) -> None:
    """Removes a file; ignores failures, because the file has no effect if it stays."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _write_owner(descriptor: int, who: Owner) -> None:
    """Replaces the content of an open file by one write, always of the same length."""
    data = who.encode().ljust(1024)
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
