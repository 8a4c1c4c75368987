"""A complete checkpoint is found after a fault at any operation of a save."""

import contextlib
import errno
import itertools
import logging
import os
import resource
import sys
import tempfile
import threading

import numpy as np
import pytest

from tests.support import warm
from tests.support.fakes import fake_storage
from tests.support.fakes.fake_storage import BUCKET, Fault
from tests.support.fakes.faulty_storage import KilledError, storage
from tests.support.models.leaves import assign, leaves, step_of, value, value_of
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.errors import UserError
from tftpu.storage import files, retry

STATE = {"seen": "so far"}


def two_saves(workdir: str) -> Checkpoints:
    """Creates a workdir with the checkpoints of steps 1, the best, and 2."""
    checkpoints = Checkpoints(workdir, keep=1)
    checkpoints.save(1, leaves(1), STATE, Best("loss", 1.0))
    checkpoints.save(2, leaves(2), STATE)
    assert checkpoints.list_steps() == [1, 2]
    return checkpoints


def check_whole(workdir: str, allowed: tuple[int, ...]) -> None:
    """Returns the checkpoint that another process finds there."""
    found = Checkpoints(workdir, keep=1)
    target = leaves(0)
    restored = found.restore(target)
    assert restored.step in allowed
    assert value_of(target) == step_of(target) == restored.step
    assert restored.state == STATE
    assert found.restore(leaves(0), found.find_best()).step == found.find_best()


@pytest.fixture(scope="module")
def service():
    with (
        fake_storage.serving() as service,
        fake_storage.in_this_process({"STORAGE_EMULATOR_HOST": service.url}),
    ):
        yield service


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path):
    """Yields fresh workdirs: in a folder in memory, where fsync is free, or in a bucket."""
    if request.param == "bucket":
        service = request.getfixturevalue("service")
        yield lambda n: f"gs://{BUCKET}/{tmp_path.name}-{n}"
        service.empty()
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield lambda n: os.path.join(folder, str(n))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["EIO", "ENOSPC", "EROFS", "kill", "torn"])
def test_the_nth_operation_of_a_save_fails_for_every_n(how, place, caplog):
    for n in itertools.count(1):
        workdir = place(n)
        checkpoints = two_saves(workdir)
        with storage(n, how) as faulty, contextlib.suppress(KilledError):
            checkpoints.save(3, leaves(3), STATE, Best("loss", 0.5))
            checkpoints.wait()
        failure = checkpoints.take_failure()
        if not faulty.reached:
            break
        check_whole(workdir, (2, 3))
        if how in ("kill", "torn"):
            checkpoints = Checkpoints(workdir, keep=1)  # the next process
        elif failure is not None:
            assert failure.step == 3
        # The next save works, and removes the leftovers of the failed one.
        checkpoints.save(4, leaves(4), STATE)
        assert checkpoints.list_steps()[-1] == 4
        check_whole(workdir, (4,))
        kept = {str(checkpoints.find_best()), "4", "best"}
        assert set(files.list_names(checkpoints.folder)) == kept
    assert n > 20
    assert checkpoints.list_steps() == [3]


def test_an_incomplete_write_is_not_a_checkpoint(tmp_path):
    """The comparison can fail: without the manifest's checksums the torn one is loaded."""
    checkpoints = two_saves(str(tmp_path))
    model = tmp_path / "checkpoints/2/model.safetensors"
    model.write_bytes(model.read_bytes()[:-4] + bytes(4))
    target = leaves(0)
    assert Checkpoints(str(tmp_path)).restore(target).step == 1
    assert checkpoints.list_steps() == [1, 2]


def test_a_bucket_that_is_busy_for_a_minute_is_retried(monkeypatch, service, caplog):
    """The clock and the waits are real, shortened: 503 until the third part of a second."""
    monkeypatch.setattr(retry, "POLICY", retry.Policy(first_wait=0.02))
    service.faults.append(Fault("POST", "upload", 503, times=6))
    checkpoints = Checkpoints(f"gs://{BUCKET}/busy")
    with caplog.at_level(logging.WARNING):
        checkpoints.save(1, leaves(1), STATE)
        checkpoints.wait()
    assert checkpoints.take_failure() is None
    assert checkpoints.restore(leaves(0)).step == 1
    assert not any(fault.times for fault in service.faults)
    assert caplog.text.count("retrying for up to 300 s.") == 1


def test_a_best_checkpoint_that_could_not_be_marked_is_marked_by_the_next_save(
    tmp_path, monkeypatch, caplog
):
    """The save itself did not fail: on several hosts, only the chief would know of that."""
    checkpoints, operate = Checkpoints(str(tmp_path), keep=1), files._operate

    def fail(operation, path, *args, **keywords):
        if str(path).endswith("checkpoints/best"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return operate(operation, path, *args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_operate", fail)
        checkpoints.save(1, leaves(1), STATE, Best("loss", 1.0))
        checkpoints.save(2, leaves(2), STATE)
        assert checkpoints.list_steps() == [1, 2] and checkpoints.take_failure() is None
        assert checkpoints.find_best() is None
    assert "step 1 could not be marked as the best" in caplog.text
    checkpoints.save(3, leaves(3), STATE)
    assert checkpoints.list_steps() == [1, 3] and checkpoints.find_best() == 1


def test_an_unavailable_bucket_fails_the_save_with_the_reason(monkeypatch, service):
    monkeypatch.setattr(retry, "POLICY", retry.Policy(seconds=0.1, first_wait=0.01))
    checkpoints = Checkpoints(f"gs://{BUCKET}/away")
    service.faults += [Fault(m, ".", 503, times=None) for m in ("GET", "POST", "PUT", "DELETE")]
    checkpoints.save(1, leaves(1), STATE)
    checkpoints.wait()
    service.faults.clear()
    assert "the service answers 503" in checkpoints.take_failure().reason
    assert checkpoints.take_failure() is None
    assert checkpoints.list_steps() == []


def test_a_real_limit_on_the_size_of_files_fails_only_the_save(tmp_path):
    """The fault is not injected: the kernel stops writing half-way through a file."""
    code = (
        "import resource, signal, sys, logging\n"
        "from tests.support.models.leaves import leaves\n"
        "from tftpu.checkpoint.store import Checkpoints\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "checkpoints = Checkpoints(sys.argv[1])\n"
        "checkpoints.save(1, leaves(1), {})\n"
        "checkpoints.wait()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
        "checkpoints.save(2, leaves(2, (1000, 200)), {})\n"
        "checkpoints.wait()\n"
        "print(*checkpoints.take_failure()[:2], checkpoints.list_steps())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = warm.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "2 File too large [1]\n"
    assert not (tmp_path / "checkpoints/2").exists()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 500_000


def test_a_damaged_checkpoint_does_not_displace_the_complete_ones(tmp_path):
    """With keep=1, a broken checkpoint of a later step must not count as the one to keep."""
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    for step in (1, 9):
        checkpoints.keep = 2
        checkpoints.save(step, leaves(step), STATE)
    checkpoints.wait()
    (tmp_path / "checkpoints/9/model.safetensors").write_bytes(b"")
    again = Checkpoints(str(tmp_path), keep=1)
    assert again.restore(leaves(0)).step == 1
    again.save(5, leaves(5), STATE)
    again.wait()
    check_target = leaves(0)
    assert Checkpoints(str(tmp_path)).restore(check_target).step == 5
    again.save(9, leaves(9), STATE)  # the run reaches this step again
    assert again.list_steps() == [9]
    check_target = leaves(0)
    assert Checkpoints(str(tmp_path)).restore(check_target).step == 9
    assert value_of(check_target) == 9


def test_a_damaged_best_checkpoint_does_not_remove_the_others(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), STATE, Best("loss", 0.5))
    checkpoints.save(2, leaves(2), STATE)
    checkpoints.wait()
    (tmp_path / "checkpoints/1/model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"step 1 in .* complete ones: 2. Remove .*/best to use"):
        checkpoints.restore(leaves(0), checkpoints.find_best())


def test_a_run_with_only_damaged_checkpoints_does_not_start_from_scratch(tmp_path):
    two_saves(str(tmp_path))
    for step in (1, 2):
        (tmp_path / f"checkpoints/{step}/model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"No checkpoint in .* is complete \(found 2; 1\)"):
        Checkpoints(str(tmp_path)).restore(leaves(0))


def test_the_variables_may_change_while_they_are_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path))
    saved = leaves(1, shape=(500, 500))
    changed = threading.Event()

    def held_up(operation, path, function, *args, **keywords):
        assert changed.wait(60)
        return function(*args, **keywords)

    monkeypatch.setattr(files, "_operate", held_up)
    checkpoints.save(1, saved, STATE)
    for leaf in [*saved["model"], *saved["step"]]:
        assign(leaf, np.full(leaf.shape, 7, leaf.dtype))
    changed.set()
    checkpoints.wait()
    assert value_of(saved) == 7
    target = leaves(0, shape=(500, 500))
    checkpoints.restore(target)
    assert (value(target["model"][0]) == np.float32(1)).all()


def test_a_save_waits_for_the_previous_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path))
    under_way = []

    def watch(operation, path, function, *args, **keywords):
        under_way.append(path)
        return function(*args, **keywords)

    monkeypatch.setattr(files, "_operate", watch)
    for step in range(1, 6):
        checkpoints.save(step, leaves(step), STATE)
    checkpoints.wait()
    order = [int(str(path).split("checkpoints/")[1].split("/")[0]) for path in under_way
             if str(path).endswith("state.json")]  # fmt: skip
    assert order == sorted(order)
    assert checkpoints.list_steps() == [3, 4, 5]


def test_keep_every_keeps_the_multiples(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=2, keep_every=10)
    for step in range(5, 45, 5):
        checkpoints.save(step, leaves(step), STATE)
    assert checkpoints.list_steps() == [10, 20, 30, 35, 40]
