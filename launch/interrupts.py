"""Ends a command with one line at Ctrl-C, even if a library hides or drops the interrupt."""

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from tftpu.errors import ExitCode

_SOON = 0.05  # seconds until a Ctrl-C that was lost is repeated


class _Noting:
    """A handler of Ctrl-C that raises `KeyboardInterrupt`, as Python's does, and records it.

    Attributes:
        noted: whether Ctrl-C was pressed.
    """

    def __init__(self):
        self.noted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        signal.default_int_handler(number, frame)


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Records a Ctrl-C in the `with` block for `was_interrupted` and `raise_lost`.

    C code that calls back into Python may drop the interrupt or raise another error in its place.
    TensorFlow's tracing, for example, raises an error about a sequence with too few items.
    """
    if not _raises_at_interrupt():
        yield
        return
    before = signal.signal(signal.SIGINT, _Noting())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def was_interrupted(error: BaseException) -> bool:
    """Returns whether Ctrl-C caused an error, even if a library raised another error for it."""
    cause = error.__cause__ or error.__context__
    is_one = isinstance(error, KeyboardInterrupt) or _is_noted()
    return is_one or (cause is not None and was_interrupted(cause))


def raise_lost() -> None:
    """Raises `KeyboardInterrupt` if a Ctrl-C was recorded that a library has dropped."""
    if _is_noted():
        raise KeyboardInterrupt


def _is_noted() -> bool:
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(handler, _Noting) and handler.noted


def _raises_at_interrupt() -> bool:
    """Returns whether this is the main thread, and Ctrl-C raises `KeyboardInterrupt` in it."""
    handler = signal.getsignal(signal.SIGINT)
    raises = handler is signal.default_int_handler or isinstance(handler, _Noting)
    return raises and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """Ends the process at Ctrl-C during imports, because importing NumPy hides the interrupt."""
    if not _raises_at_interrupt():
        yield
        return

    def end(*_: object) -> None:
        print("tftpu: interrupted", file=sys.stderr, flush=True)
        os._exit(int(ExitCode.INTERRUPTED))

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def die_at_interrupt() -> None:
    """Lets Ctrl-C end a process whose work is done, without the traceback that Python prints."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        print(end="", flush=True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def repeating_lost_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that Python drops because a callback or finalizer was running.

    Garbage collection, for example, calls back into JAX.
    """
    before = sys.unraisablehook

    def report(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(_SOON, _thread.interrupt_main).start()  # after the callback
        else:
            before(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def answering_sigterm() -> Iterator[None]:
    """Handles SIGTERM, which `timeout` sends, like Ctrl-C within the `with` block."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
