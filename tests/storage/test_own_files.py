"""Small files of a run in a bucket: what another process wrote there is not replaced."""

import itertools
import json
import logging

import pytest
import tensorflow as tf

from tests.support.fakes.fake_storage import BUCKET, Fault
from tests.support.models.leaves import leaves, step_of
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.runtime import goodput
from tftpu.storage import buckets, files, locks, owner, retry
from tftpu.storage.lease import Lease
from tftpu.storage.own_files import OwnFile

RUN = f"gs://{BUCKET}/run"
THEIRS = b'{"step": 7, "of": "another process"}'


@pytest.fixture
def service(_bucket, monkeypatch):
    _bucket.empty()
    tf.io.gfile.listdir(f"gs://{BUCKET}")
    monkeypatch.setattr(retry, "POLICY", retry.Policy(0.3, first_wait=0.01, longest_wait=0.04))
    return _bucket


def not_ours():
    return pytest.raises(buckets.ChangedError, match="another process wrote it meanwhile")


def test_a_file_that_another_process_wrote_is_neither_replaced_nor_removed(service):
    file = OwnFile(RUN, "mark")
    file.write(b"1")
    file.write(b"2")
    assert service.content("run/mark") == b"2"
    service.overwrite("run/mark", THEIRS)
    for change in (lambda: file.write(b"3"), file.remove):
        with not_ours():
            change()
        assert service.content("run/mark") == THEIRS


def test_a_file_that_appeared_since_the_run_looked_is_not_replaced(service):
    file = OwnFile(RUN, "mark")
    file.see()
    service.overwrite("run/mark", THEIRS)
    with not_ours():
        file.write(b"1")


def test_the_account_of_another_process_stays_and_a_warning_says_so(service, caplog):
    account = goodput.Account(RUN, goodput.Clock())
    account.write(goodput.RUNNING, goodput.Facts(step=1))
    assert goodput.read(RUN).facts.step == 1
    service.overwrite("run/goodput.json", THEIRS)
    account.write(goodput.RUNNING, goodput.Facts(step=2))
    assert service.content("run/goodput.json") == THEIRS
    assert "another process wrote it meanwhile" in caplog.text


def test_the_best_mark_of_another_process_stays(service):
    checkpoints = Checkpoints(RUN)
    checkpoints.save(1, leaves(1), {}, Best("loss", 0.5))
    checkpoints.wait()
    assert checkpoints.find_best() == 1
    service.overwrite("run/checkpoints/best", THEIRS)
    checkpoints.save(2, leaves(2), {}, Best("loss", 0.4))
    with not_ours():
        checkpoints.wait()
    assert service.content("run/checkpoints/best") == THEIRS


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("when", ["before the files", "between the files"])
def test_a_checkpoint_that_another_process_completed_meanwhile_stays_its_own(
    when, resumed, service, monkeypatch
):
    """Its files may be a mixture by then: the checksums in the manifest tell."""
    if resumed:
        earlier = Checkpoints(RUN)
        earlier.save(2, leaves(2), {"of": "an earlier process"})
        earlier.wait()
    manifest = "run/checkpoints/2/manifest.json"
    checkpoints = Checkpoints(RUN)
    checkpoints.save(1, leaves(1), {})
    checkpoints.wait()
    write = files.write_whole

    def slow(path, data):
        write(path, data)
        service.overwrite(manifest, THEIRS)

    if when == "between the files":
        monkeypatch.setattr(files, "write_whole", slow)
        checkpoints.save(2, leaves(2), {})
    else:
        checkpoints.save(2, leaves(2), {}, first=lambda: service.overwrite(manifest, THEIRS))
    with not_ours():
        checkpoints.wait()
    assert service.content(manifest) == THEIRS
    assert Checkpoints(RUN).restore(leaves(0)).step == 1


def test_a_step_is_saved_again_after_a_resume(service):
    for seen in ("first", "second, and longer"):
        checkpoints = Checkpoints(RUN)
        checkpoints.save(1, leaves(1), {"seen": seen}, Best("loss", 0.5))
        restored = checkpoints.restore(target := leaves(0))
        assert (restored.state, step_of(target)) == ({"seen": seen}, 1)
        assert checkpoints.find_best() == 1


def test_a_damaged_mark_in_a_bucket_is_set_aside_and_written_again(service):
    service.overwrite("run/checkpoints/best", b"{")
    checkpoints = Checkpoints(RUN)
    checkpoints.save(1, leaves(1), {}, Best("loss", 0.5))
    checkpoints.wait()
    assert checkpoints.find_best() == 1
    assert service.content("run/checkpoints/best.damaged") == b"{"


def test_each_claim_of_a_workdir_sees_the_files_anew(service):
    """A notebook trains, another process continues the run and ends, and the notebook trains."""
    file = OwnFile(RUN, "mark")
    with locks.locked(RUN):
        file.write(b"1")
    service.overwrite("run/mark", THEIRS)
    with locks.locked(RUN):
        file.write(b"2")
    assert service.content("run/mark") == b"2"


def test_a_file_that_was_seen_after_the_workdir_was_lost_is_not_written(service, monkeypatch):
    service.overwrite("run/mark", THEIRS)
    with locks.locked(RUN):
        lost(monkeypatch)
        with pytest.raises(owner.LockLostError):
            OwnFile(RUN, "mark").write(b"1")
        assert service.content("run/mark") == THEIRS


def test_a_failed_save_of_a_lost_workdir_removes_nothing(service, monkeypatch):
    manifest = "run/checkpoints/1/manifest.json"

    def fails(path, data):
        lost(monkeypatch)
        service.overwrite(manifest, THEIRS)
        raise OSError("the network is down")

    with locks.locked(RUN):
        checkpoints = Checkpoints(RUN)
        monkeypatch.setattr(files, "write_whole", fails)
        checkpoints.save(1, leaves(1), {})
        with pytest.raises(owner.LockLostError):
            checkpoints.wait()
        assert service.content(manifest) == THEIRS


def lost(monkeypatch) -> None:
    """Makes the process find that it lost the workdir."""

    def check(self):
        raise owner.LockLostError("another process has it")

    monkeypatch.setattr(Lease, "check", check)


@pytest.mark.parametrize("what", [503, "drop", "truncate"])
def test_the_nth_request_fails_for_every_n(what, service, monkeypatch):
    """Also where only the answer is lost: the run's own content is never taken for another's."""
    monkeypatch.setattr(retry, "POLICY", retry.Policy(20.0, first_wait=0.01, longest_wait=0.04))
    for n in itertools.count(0):
        service.empty()
        faults = [Fault(m, ".", what, after=n) for m in ("GET", "POST", "DELETE")]
        service.faults += faults
        file = OwnFile(RUN, "mark")
        for content in (b"1", b"2"):
            file.write(content)
            assert service.content("run/mark") == content
        file.remove()
        assert service.names() == set()
        file.write(b"3")
        if all(fault.times for fault in faults):
            break
    assert n > 2


def test_a_write_whose_answer_never_came_does_not_block_the_next(service, caplog):
    file = OwnFile(RUN, "mark")
    file.write(b"1")
    with caplog.at_level(logging.ERROR):
        for content in (b"2", b"3"):
            service.faults += [Fault("POST", ".", "drop", times=None)]
            service.faults += [Fault("GET", ".", 503, times=None)]
            with pytest.raises(OSError, match="mark"):
                file.write(content)
        service.faults.clear()
        file.write(b"4")
    assert service.content("run/mark") == b"4"


def test_a_disk_keeps_what_it_had(tmp_path):
    file = OwnFile(tmp_path, "mark")
    file.write(json.dumps({"step": 1}).encode())
    assert file.take(step=int) == {"step": 1}
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []
