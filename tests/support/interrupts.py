"""Ctrl-C while a command waits."""

import threading
import time

import pytest


def interrupt_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts the next `time.sleep` of the calling thread; other threads, of clients, sleep."""
    interrupted, sleep = threading.current_thread(), time.sleep

    def sleeping(seconds: float) -> None:
        if threading.current_thread() is interrupted:
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleeping)
