"""One run at a time writes to a workdir: on disks, on disks without locks, and in buckets."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support.fakes.fake_storage import BUCKET, Fault
from tests.support.models.leaves import leaves
from tftpu.checkpoint.store import Checkpoints
from tftpu.errors import UserError
from tftpu.storage import locks, owner, retry
from tftpu.storage.owner import LockedError, LockLostError

RUN = f"gs://{BUCKET}/run"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Beats of 0.1 s, and locks that expire after 0.8 s."""
    monkeypatch.setattr(owner, "BEAT", 0.1)
    monkeypatch.setattr(owner, "EXPIRES", 0.8)


@pytest.fixture
def service(_bucket, monkeypatch):
    _bucket.empty()
    monkeypatch.setattr(retry, "POLICY", retry.Policy(0.3, first_wait=0.01, longest_wait=0.04))
    return _bucket


@pytest.fixture
def no_locks(monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)


@pytest.fixture(params=["disk", "no locks", "bucket"])
def workdir(request, tmp_path):
    """Returns a workdir of each kind."""
    if request.param == "bucket":
        request.getfixturevalue("service")
        return RUN
    if request.param == "no locks":
        request.getfixturevalue("no_locks")
    return str(tmp_path / "run")


@contextlib.contextmanager
def another_process(workdir: str):
    """Claims a workdir as another process on another machine does, as far as its files tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "_identify_space", lambda: "another machine")
        patch.setattr(owner.socket, "gethostname", lambda: "elsewhere")
        lock = locks._acquire_lock(workdir)
    over = threading.Event()
    beats = threading.Thread(target=locks._renew_until, args=(workdir, lock, over), daemon=True)
    beats.start()
    try:
        yield over
    finally:
        over.set()
        beats.join()


def test_a_claimed_workdir_is_not_claimed_again(workdir):
    held = pytest.raises(LockedError, match=r"is held by process .*elsewhere")
    with another_process(workdir), held, locks.locked(workdir):
        pass


@pytest.mark.parametrize("scheme", ["s3", "hdfs", "ram", "file"])
def test_an_address_that_nothing_can_lock_is_refused(scheme, tmp_path):
    place = f"{scheme}://{tmp_path.name}/run"
    refused = pytest.raises(UserError, match=r"give a local one, or gs://BUCKET/FOLDER")
    with refused, locks.locked(place):
        pass
    assert not locks._held


def test_a_released_workdir_is_claimed_at_once(workdir, monkeypatch):
    for _ in range(3):
        with locks.locked(workdir), locks.locked(workdir):  # nested in one process
            locks.check_lock(workdir)
    assert not locks._held
    monkeypatch.setattr(owner, "EXPIRES", 3600.0)  # nothing is waited for
    with locks.locked(workdir):
        pass


@pytest.mark.medium
@pytest.mark.parametrize("workdir", ["no locks", "bucket"], indirect=True)
def test_an_owner_that_falls_silent_is_replaced_once_its_lock_expires(workdir, caplog):
    with another_process(workdir) as over:
        over.set()  # its machine is gone: no more beats
        time.sleep(0.2)
        began = time.monotonic()
        with locks.locked(workdir):
            assert time.monotonic() - began > 0.6
            assert "held by process" in caplog.text and "waiting up to" in caplog.text
            with pytest.raises(LockedError):
                locks._acquire_lock(workdir)


@pytest.mark.medium
@pytest.mark.parametrize("workdir", ["no locks", "bucket"], indirect=True)
def test_an_owner_that_comes_back_after_its_lock_expired_stops_writing(workdir, monkeypatch):
    with locks.locked(workdir):
        ours = locks._held[locks._place(workdir)]
        with monkeypatch.context() as patch:
            patch.setattr(type(ours), "renew", lambda self: None)  # the process is suspended
            with another_process(workdir):
                patch.undo()
                end = time.monotonic() + 10
                with pytest.raises(LockLostError, match=r"was taken over by process .*elsewhere"):
                    while time.monotonic() < end:
                        with contextlib.suppress(OSError):  # not renewed for too long
                            locks.check_lock(workdir)
                        time.sleep(0.02)


def test_a_killed_owner_on_this_machine_is_replaced_at_once(workdir, monkeypatch):
    """A restart does not wait: the process is known to be dead."""
    code = (
        "import errno, sys, time\nfrom tftpu.storage import locks\n"
        "def refused(*_): raise OSError(errno.ENOLCK, 'No locks')\n"
        "if sys.argv[2] == 'refused': locks.fcntl.flock = refused\n"
        "with locks.locked(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    kind = fcntl.flock.__name__
    holder = subprocess.Popen(
        [sys.executable, "-c", code, workdir, kind], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=f"process {holder.pid}"), locks.locked(workdir):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    monkeypatch.setattr(owner, "EXPIRES", 3600.0)
    with locks.locked(workdir):
        pass


def test_a_disk_without_locks_says_so_and_refuses_a_second_run(no_locks, tmp_path, caplog):
    with locks.locked(tmp_path):
        assert "The system cannot lock" in caplog.text
        with pytest.raises(LockedError):
            locks._acquire_lock(tmp_path)


@pytest.mark.parametrize("first", ["kernel", "beats"])
def test_the_two_kinds_of_locks_on_a_disk_exclude_each_other(first, tmp_path, monkeypatch):
    """One of two machines that share a network disk may be without locks."""

    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", real if first == "kernel" else refused)
    with another_process(str(tmp_path)):
        monkeypatch.setattr(fcntl, "flock", refused if first == "kernel" else real)
        with pytest.raises(LockedError):
            locks._acquire_lock(tmp_path)


def test_of_many_that_see_an_expired_lock_one_gets_it(workdir):
    """Threads stand for processes: each takes the lock by itself."""
    with another_process(workdir) as over:
        over.set()
        time.sleep(0.2)
        if locks.is_locked(workdir) is True:  # the kernel's lock never expires
            return
        won, refused = [], []

        def take():
            try:
                won.append(locks._acquire_lock(workdir))
            except LockedError as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(refused)) == (1, 4)
        won[0].check()


@pytest.mark.medium
def test_a_lock_taken_since_an_expired_one_was_seen_stays_in_its_place(
    no_locks, tmp_path, monkeypatch
):
    """If it were away for a moment, a third process could take the workdir as well."""
    workdir = str(tmp_path / "run")
    with another_process(workdir) as over:
        over.set()
    path = tmp_path / "run" / locks._BEATS
    path.write_bytes(path.read_bytes().replace(b'"released": true', b'"released": false'))
    real, won, away = owner.is_alive, [], []

    def alive(look, say):
        """Sees the expired lock, and is overtaken by another process."""
        found = real(look, say)
        monkeypatch.setattr(owner, "is_alive", real)
        won.append(locks._acquire_lock(workdir))
        for change in ("rename", "unlink"):
            monkeypatch.setattr(os, change, noting(getattr(os, change)))
        return found

    def noting(change):
        def noted(name, *args):
            away.append(str(name) == str(path))
            return change(name, *args)

        return noted

    monkeypatch.setattr(owner, "is_alive", alive)
    with pytest.raises(LockedError):
        locks._acquire_lock(workdir)
    won[0].check()
    assert away and not any(away)


@pytest.mark.parametrize("workdir", ["disk", "no locks"], indirect=True)
@pytest.mark.parametrize("again", [False, True])
def test_a_workdir_that_is_deleted_under_a_run_is_noticed(workdir, again):
    with locks.locked(workdir):
        checkpoints = Checkpoints(workdir)
        checkpoints.save(1, leaves(1), {})
        checkpoints.wait()
        shutil.rmtree(workdir)
        if again:
            os.makedirs(workdir)
        with pytest.raises(LockLostError, match="deleted while this run was writing to it"):
            locks.check_lock(workdir)
        checkpoints.save(2, leaves(2), {})
        with pytest.raises(LockLostError):
            checkpoints.wait()
        assert os.path.exists(workdir) == again  # nothing brings it back
        assert not again or os.listdir(workdir) == []


def test_a_workdir_that_is_replaced_by_the_one_of_another_run_is_noticed(tmp_path):
    workdir = tmp_path / "run"
    with locks.locked(workdir):
        workdir.rename(tmp_path / "moved")
        with another_process(str(workdir)), pytest.raises(LockLostError, match="was replaced"):
            locks.check_lock(workdir)


@pytest.mark.medium
def test_a_lease_is_kept_while_the_bucket_is_away_and_no_checkpoint_is_written(service):
    with locks.locked(RUN):
        time.sleep(0.3)
        service.faults += [Fault(m, ".", 503, times=None) for m in ("GET", "POST", "PUT")]
        end = time.monotonic() + 10
        with pytest.raises(OSError, match="could not be renewed"):
            while time.monotonic() < end:
                locks.check_lock(RUN)
                time.sleep(0.02)
        service.faults.clear()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                locks.check_lock(RUN)
                break
            time.sleep(0.02)
        locks.check_lock(RUN)


def elsewhere() -> bytes:
    """Returns the lease of another process, which has just been taken or renewed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner.socket, "gethostname", lambda: "elsewhere")
        return owner.Owner.from_this_process(exclusive=False).encode()


def test_a_lease_that_another_process_took_a_moment_before_is_left_to_it(service, monkeypatch):
    theirs, alive = elsewhere(), owner.is_alive

    def slow(look, say):
        found = alive(look, say)
        service.overwrite("run/.lease", theirs)
        return found

    monkeypatch.setattr(owner, "is_alive", slow)
    with pytest.raises(LockedError, match="elsewhere"):
        locks._acquire_lock(RUN)
    assert service.content("run/.lease") == theirs


def test_a_lock_that_another_process_took_a_moment_before_is_given_back(
    no_locks, tmp_path, monkeypatch
):
    theirs, alive, beats = elsewhere(), owner.is_alive, tmp_path / ".lock-beats"
    beats.write_bytes(b"of a dead process\n")

    def slow(look, say):
        found = alive(look, say)
        beats.write_bytes(theirs)
        return found

    monkeypatch.setattr(owner, "is_alive", slow)
    with pytest.raises(LockedError, match="elsewhere"):
        locks._acquire_lock(tmp_path)
    assert beats.read_bytes() == theirs


def test_a_lost_lease_is_neither_renewed_nor_removed(service):
    lock = locks._acquire_lock(RUN)
    theirs = elsewhere()
    service.overwrite("run/.lease", theirs)
    with pytest.raises(LockLostError, match="elsewhere"):
        lock.renew()
    lock.release()
    assert service.content("run/.lease") == theirs


@pytest.mark.medium
@pytest.mark.parametrize("what", [503, "drop", "truncate"])
def test_the_nth_request_of_a_lease_fails_for_every_n(what, service, monkeypatch):
    monkeypatch.setattr(retry, "POLICY", retry.Policy(20.0, first_wait=0.01, longest_wait=0.04))
    monkeypatch.setattr(owner, "BEAT", 0.02)
    monkeypatch.setattr(owner, "EXPIRES", 5.0)
    for n in range(8):
        service.faults.clear()
        service.faults += [Fault(m, ".", what, after=n) for m in ("GET", "POST", "DELETE")]
        with locks.locked(RUN):
            time.sleep(0.1)
            locks.check_lock(RUN)
            with pytest.raises(LockedError):
                locks._acquire_lock(RUN)
        if RUN.removeprefix(f"gs://{BUCKET}/") + "/.lease" in service.names():
            # The one attempt to give it back failed: as if the process had been killed.
            service.storage.wipe(keep_buckets=True)


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"{}", b'{"key": 1}', b"[" * 100_000, b"held by me\n"]
)
def test_any_content_of_a_lock_is_survived(content, tmp_path):
    (tmp_path / ".lock").write_bytes(content)
    with locks.locked(tmp_path), pytest.raises(LockedError):
        locks._acquire_lock(tmp_path)


def test_a_disk_that_fails_while_a_workdir_is_claimed_leaves_no_lock(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="cannot be written"):
        patch.setattr(locks.owner, "is_alive", fails)
        with locks.locked(tmp_path):
            pass
    with locks.locked(tmp_path):
        pass
