"""A parallel map whose processes end before this one is interrupted."""

import concurrent.futures
import os
import signal
import threading

import pytest

from tftpu.input_pipelines.convert import processes


@pytest.mark.slow
def test_processes_that_ctrl_c_ends_first_are_an_interrupt(monkeypatch):
    sleep, own = processes.time.sleep, signal.getsignal(signal.SIGINT)

    def interrupt_later(seconds: float) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        sleep(seconds)

    monkeypatch.setattr(processes.time, "sleep", interrupt_later)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), processes.parallel_map(2, 3) as each:
            each(os._exit, [1, 1, 1])
    finally:
        signal.signal(signal.SIGINT, own)


@pytest.mark.slow
def test_processes_that_end_by_themselves_are_an_error(monkeypatch):
    monkeypatch.setattr(processes, "_INTERRUPT", 0.01)
    ended = concurrent.futures.process.BrokenProcessPool
    with pytest.raises(ended), processes.parallel_map(2, 3) as each:
        each(os._exit, [1, 1, 1])
