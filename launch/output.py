"""Prints what a command does, and lets it continue if its output can no longer be written."""

import contextlib
import errno
import io
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from tftpu.launch import interrupts
from tftpu.runtime.slow import counting_seconds, report_activity

_SLOW = 2.0  # seconds; only output that comes later after a closed pager is reported as lost


def outlive_readers() -> None:
    """Lets the command continue when its output can no longer be written.

    Hours of training must not end because a pager was closed. Later output is lost, which is
    reported once on standard error; for a closed pager, only if output follows some seconds later.
    Metrics and checkpoints are in the workdir as always. Characters that the terminal cannot show
    are printed as escapes.
    """
    if sys.stdout is not None:
        sys.stdout = _wrap_stream(sys.stdout, os.dup(2) if sys.stderr is not None else None)
    if sys.stderr is not None:
        sys.stderr = _wrap_stream(sys.stderr, None)


def is_reader_gone() -> bool:
    """Returns whether standard output can no longer be written, so that a command can stop."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _LossyDescriptor) and raw.lost


def _wrap_stream(stream: TextIO, notices: int | None) -> TextIO:
    stream.flush()
    # A stream without a buffer (PYTHONUNBUFFERED) is replaced by one that writes line by line.
    by_line = getattr(stream, "line_buffering", False) or getattr(stream, "write_through", False)
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyDescriptor(stream.fileno(), notices)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=by_line,
    )


class _LossyDescriptor(io.FileIO):
    """A file descriptor that becomes the null device when a write to it fails.

    Args:
        descriptor: the descriptor to write to.
        notices: the descriptor to which the failure is reported; None reports nothing.

    Attributes:
        lost: whether a write has failed.
    """

    def __init__(self, descriptor: int, notices: int | None):
        super().__init__(descriptor, "w", closefd=False)
        self._notices = notices
        self._since = 0.0
        self.lost = False

    def write(self, data: Any, /) -> int:
        if self.lost and time.monotonic() - self._since > _SLOW:
            self._report("its reader has gone")
        try:
            return super().write(data)
        except OSError as error:
            self.lost, self._since = True, time.monotonic()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            # A reader such as `head` may close on purpose: `write` reports it if output continues.
            if error.errno != errno.EPIPE:
                self._report(str(error.strerror))
            return len(data)

    def _report(self, why: str) -> None:
        """Reports once why the output is lost."""
        notices, self._notices = self._notices, None
        if notices is None:
            return
        text = f"tftpu: the output cannot be written ({why}): continuing without it.\n"
        with contextlib.suppress(OSError):  # the reader of stderr is gone as well
            os.write(notices, text.encode())


@contextlib.contextmanager
def reporting(doing: str) -> Iterator[None]:
    """Prints what the `with` block does, and at intervals how many seconds it has taken so far."""
    report_activity(doing)
    with counting_seconds(doing):
        yield
    interrupts.raise_lost()
