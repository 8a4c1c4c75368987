"""Locks on a disk whose nth operation fails: held or refused, never twice, and nothing is left."""

import contextlib
import errno
import fcntl
import itertools
import os

import pytest

from tftpu.errors import UserError
from tftpu.storage import files, owner
from tftpu.storage import locks as lock_module
from tftpu.storage.owner import LockedError, LockLostError

OPERATIONS = ("open", "link", "rename", "pwrite", "pread", "ftruncate", "unlink", "stat", "fstat")
DEAD = owner.Owner("a key", 1 << 30, "here", "", 1, "before", exclusive=False)


class Disk:
    """A disk whose nth operation fails once; it stands for the modules that `locks` calls.

    Args:
        fails: number of the operation that fails; 0: none.
        locks: whether it has locks of the kernel.
    """

    def __init__(self, fails: int = 0, locks: bool = True):
        self._fails, self._locks, self.count = fails, locks, 0

    def __getattr__(self, name):
        real = getattr(os, name, None) or getattr(fcntl, name)
        if name not in (*OPERATIONS, "flock"):
            return real
        return lambda *args, **keywords: self.operate(name, args[0], real, *args, **keywords)

    def operate(self, name, path, function, *args, **keywords):
        self.count += 1
        if self.count == self._fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if name == "flock" and not self._locks:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return function(*args, **keywords)

    @property
    def reached(self) -> bool:
        return self.count >= self._fails

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        for module, name in ((lock_module, "os"), (lock_module, "fcntl")):
            self._patch.setattr(module, name, self)
        self._patch.setattr(files, "_operate", self.operate)
        return self

    def __exit__(self, *_):
        self._patch.undo()


@pytest.fixture(params=["locks", "no locks"])
def locks(request) -> bool:
    return request.param == "locks"


@pytest.fixture(params=["new", "empty", "left by a dead process"])
def folder(request, tmp_path, monkeypatch):
    """Returns a function that returns a fresh workdir."""
    monkeypatch.setattr(owner, "_identify_space", lambda: "this machine")

    def made(n: int):
        workdir = tmp_path / str(n)
        if request.param != "new":
            workdir.mkdir()
        if request.param.startswith("left"):
            dead = owner.dataclasses.replace(DEAD, space="this machine")
            for name in (".lock", ".lock-beats"):
                (workdir / name).write_bytes(dead.encode())
        return workdir

    return made


def open_in(folder) -> list[str]:
    """Returns what this process holds open in a folder; other tests' threads open files, too."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if link.startswith(str(folder))]


def is_refused(workdir, locks: bool) -> None:
    """Checks that a second claim is refused, of a process with and without the kernel's locks."""
    for kind in (locks, not locks):
        with Disk(locks=kind), pytest.raises(LockedError):
            lock_module._acquire_lock(workdir)


def is_free(workdir, locks: bool) -> None:
    """Checks that the next claim holds; a file that could not be removed has no meaning."""
    with Disk(locks=locks):
        lock = lock_module._acquire_lock(workdir)
        lock.check()
        lock.release()
    left = {path.name for path in workdir.iterdir()} - {".lock", ".lock-beats"}
    assert len(left) <= 1 and all(name.startswith(".lock-beats.") for name in left)


def test_the_nth_operation_of_a_claim_fails_for_every_n(folder, locks):
    for n in itertools.count(1):
        workdir, lock = folder(n), None
        with Disk(n, locks) as disk:
            try:
                lock = lock_module._acquire_lock(workdir)
            except UserError as error:
                assert not isinstance(error, LockedError)
        if lock is not None:
            lock.check()
            is_refused(workdir, locks)
            lock.release()
        assert not open_in(workdir), n
        is_free(workdir, locks)
        if not disk.reached:
            break
    assert n > 4


def test_the_nth_operation_of_a_second_claim_fails_for_every_n(folder, locks):
    for n in itertools.count(1):
        workdir = folder(n)
        with Disk(locks=locks):
            lock = lock_module._acquire_lock(workdir)
        before = open_in(workdir)
        for seconds in (True, False):
            with Disk(n, seconds) as disk, pytest.raises(UserError):
                lock_module._acquire_lock(workdir)
            lock.check()
            is_refused(workdir, locks)
        assert open_in(workdir) == before, n
        lock.release()
        is_free(workdir, locks)
        if not disk.reached:
            break


def test_the_nth_operation_of_holding_a_lock_fails_for_every_n(folder, locks):
    for n in itertools.count(1):
        workdir = folder(n)
        with Disk(locks=locks):
            lock = lock_module._acquire_lock(workdir)
        with Disk(n, locks) as disk:
            for step in (lock.check, lock.renew, lock.renew):
                try:
                    step()
                except OSError:
                    step()  # the next time it works
        lock.check()
        is_refused(workdir, locks)
        lock.release()
        assert not open_in(workdir), n
        is_free(workdir, locks)
        if not disk.reached:
            break


def test_the_nth_operation_of_a_release_fails_for_every_n(folder, locks):
    for n in itertools.count(1):
        workdir = folder(n)
        with Disk(locks=locks):
            context = lock_module.locked(workdir)
            context.__enter__()
        with Disk(n, locks) as disk:
            context.__exit__(None, None, None)
        assert not open_in(workdir), n
        if workdir.exists():
            is_free(workdir, locks)
        if not disk.reached:
            break


def test_a_release_that_fails_leaves_the_file_of_another_owner(tmp_path):
    with Disk(locks=False):
        lock = lock_module._acquire_lock(tmp_path)
    beats = tmp_path / ".lock-beats"
    beats.unlink()
    beats.write_bytes(DEAD.encode())
    with Disk(1, locks=False), pytest.raises(LockLostError):
        lock.release()
    assert beats.read_bytes() == DEAD.encode()
