"""A trial's process and its worker: answers, a worker that is silent or gone, held runs."""

import os
import signal
import threading
from multiprocessing import Pipe

import pytest

from tftpu.launch.search import child
from tftpu.storage import locks
from tftpu.storage.owner import LockedError


def test_an_answer_is_waited_for():
    ours, theirs = Pipe()
    threading.Timer(0.5, ours.send, ["prune"]).start()
    assert child._ask_worker(theirs, (1, 0.5, False)) == "prune"
    assert ours.recv() == (1, 0.5, False)


@pytest.mark.medium
def test_a_process_that_is_asked_to_stop_waits_for_no_answer():
    noted = []
    before = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        _silent, theirs = Pipe()  # a worker that waits for a bucket, say
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert child._ask_worker(theirs, (1, 0.5, False)) == ""
        assert noted == [signal.SIGTERM]  # whoever stops the training knows of it
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_worker_that_is_gone_answers_nothing():
    ours, theirs = Pipe()
    ours.close()
    assert child._ask_worker(theirs, (1, 0.5, False)) == ""


def test_a_run_that_stays_held_is_told_to_the_worker(monkeypatch):
    def refuse(_):
        raise LockedError("held")

    monkeypatch.setattr(child, "_PATIENCE", 0.0)
    monkeypatch.setattr(locks, "locked", refuse)
    ours, theirs = Pipe()
    with pytest.raises(LockedError), child._report_end(theirs), child._locked_run("anywhere"):
        pass
    assert ours.poll() and ours.recv() == child.HELD
