"""Writers in the background never hold up the run, and lose nothing that a limit does not say."""

import threading
import time

import numpy as np
import pytest

from tftpu.observe import background
from tftpu.observe.background import Background, Worker
from tftpu.observe.writers import Writer


class Slow(Writer):
    """A writer that waits for its service, and notes what it got."""

    def __init__(self):
        self.back = threading.Event()
        self.got: list = []

    def write(self, step, split, scalars):
        assert self.back.wait(60)
        self.got.append((split, step, scalars["loss"]))

    def write_text(self, step, name, text):
        self.got.append((name, step))

    def write_images(self, step, name, images):
        self.got.append((name, step, images.shape))

    def roll_back(self, step):
        self.got.append(("roll back", step))

    def begin(self, config):
        self.got.append(config)

    def say(self, text):
        self.got.append(text)

    def flush(self, durable=False):
        if durable:
            self.got.append("durable")

    def close(self):
        self.got.append("close")


def test_the_run_does_not_wait_and_everything_arrives_in_order():
    slow = Slow()
    writer = Background(slow)
    scalars = {"loss": 1.0}
    began = time.monotonic()
    writer.begin({"a": 1})
    writer.write(1, "train", scalars)
    scalars["loss"] = 2.0  # belongs to the run: the writer has its own copy
    writer.write_text(2, "model", "text")
    writer.write_images(3, "samples", np.zeros((1, 2, 2, 3), np.uint8))
    writer.roll_back(0)
    writer.say("hello")
    writer.flush(durable=True)
    assert not writer.wait(0.1)
    assert time.monotonic() - began < 5.0
    slow.back.set()
    assert writer.wait(10)
    writer.close()
    expected = [{"a": 1}, ("train", 1, 1.0), ("model", 2), ("samples", 3, (1, 2, 2, 3))]
    assert slow.got == [*expected, ("roll back", 0), "hello", "durable", "close"]


def test_the_end_of_a_run_waits_for_a_limited_time(caplog):
    writer = Background(Slow(), closing=0.2)
    writer.write(1, "train", {"loss": 1.0})
    began = time.monotonic()
    writer.close()
    assert time.monotonic() - began < 10.0
    assert "Slow could not write everything" in caplog.text


def test_calls_beyond_the_limit_are_dropped_and_counted(monkeypatch, caplog):
    monkeypatch.setattr(background, "LIMIT", 5)
    slow = Slow()
    writer = Background(slow)
    for step in range(20):
        writer.write(step, "train", {"loss": 1.0})
    slow.back.set()
    writer.wait(10)
    writer.close()
    kept = [got for got in slow.got if got[0] == "train"]
    assert 5 <= len(kept) <= 6
    assert f"lost the output of {20 - len(kept)} dropped calls" in caplog.text
    assert caplog.text.count("further calls are dropped") == 1


def test_a_declared_error_is_reported_once_and_another_one_ends_the_run(caplog):
    class Away(Writer):
        failures = (LookupError,)

        def write(self, step, split, scalars):
            raise LookupError("away") if step < 3 else ZeroDivisionError

    writer = Background(Away())
    for step in (1, 2):
        writer.write(step, "train", {})
    assert writer.wait(10)
    assert caplog.text.count("Away cannot write (away)") == 1
    writer.write(3, "train", {})
    with pytest.raises(ZeroDivisionError):
        for _ in range(1000):
            writer.write(1, "train", {})
            time.sleep(0.001)


def test_a_thread_that_nothing_was_asked_of_is_not_started():
    before = threading.active_count()
    worker = Worker("none", 1)
    assert worker.wait(0) and worker.close(0)
    assert threading.active_count() == before


def test_a_queue_and_its_last_call_are_waited_for_together():
    worker, now = Worker("slow", 1), threading.Event()
    worker.submit(lambda: time.sleep(0.6))
    time.sleep(0.1)  # for the thread to take the call
    worker.submit(now.wait)
    began = time.monotonic()
    assert not worker.close(0.8)  # the queue has a place after 0.5 s
    assert time.monotonic() - began < 1.1
    now.set()
