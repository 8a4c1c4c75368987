"""Progress of a check: one live line on a terminal, a few plain lines elsewhere."""

import contextlib
import dataclasses
import shutil
import sys
import threading
import time
from collections.abc import Iterator

import psutil

from tftpu.amounts import format_duration, format_size

_EVERY = 0.5  # seconds between two updates of the display
# Seconds after which a phase prints its first two lines; from then on, the interval doubles, up
# to a minute.
_FIRST, _SECOND, _LONGEST = 1.0, 10.0, 60.0
_LONG = 20.0  # seconds after which a check prints each result at once, before the report


@dataclasses.dataclass
class Phase:
    """A phase of a check that takes time.

    Attributes:
        text: what is being done, such as "compiling v5e-8".
        process: id of the compiler's process; None: this process does the work.
        limit: seconds after which the process is stopped, as for `Processes.run`; None: never.
        expected: seconds of processor time that the phase usually takes; None: not known.
        start: start of the phase on the monotonic clock, in seconds.
        next_line: seconds after the start at which the next plain line is due.
    """

    text: str
    process: int | None = None
    limit: float | None = None
    expected: float | None = None
    start: float = dataclasses.field(default_factory=time.monotonic)
    next_line: float = _FIRST

    @property
    def seconds(self) -> float:
        """Seconds since the start of the phase."""
        return time.monotonic() - self.start

    def __str__(self) -> str:
        limit = self._format_limit() if self.process and self.limit else ""
        return f"{self.text}{self._format_time()}{limit}{_format_memory(self.process)}"

    def _format_time(self) -> str:
        """Returns the time so far, and how much of the expected processor time is used.

        The remaining time is not predicted: it depends on what else the machine does.
        """
        if not self.process or not self.expected:
            return f", {self.seconds:.0f} s"
        used, usual = read_processor_seconds(self.process), _format_roughly(self.expected)
        share = f"{used / self.expected:.0%} of" if used <= self.expected else "more than"
        so_far = _format_roughly(self.seconds)
        return f": {share} the usual {usual} of processor time; {so_far} so far"

    def _format_limit(self) -> str:
        """Returns the processor time and its limit; "" until half of the limit is used."""
        limit = self.limit or 0.0
        used = read_processor_seconds(self.process or 0)
        if min(used, self.seconds) < limit / 2:  # as in `Processes.run`, both times must reach it
            return ""
        return f" ({format_duration(used)} of processor time, limit: {format_duration(limit)})"


class Progress:
    """A display of the running phases on standard error, active in this object's `with` statement.

    Several may run at once. A separate thread shows them, because tracing keeps the caller busy.
    """

    def __init__(self) -> None:
        self._phases: list[Phase] = []
        self._first_lines: list[str] = []
        self._lines: list[str] = []
        self._last_lines: list[str] = []
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for line in self._lines + self._last_lines:
            print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def show_phase(
        self,
        text: str,
        process: int | None = None,
        limit: float | None = None,
        expected: float | None = None,
    ) -> Iterator[Phase]:
        """Yields a phase, shown until the `with` statement ends; its `text` may be changed.

        Args:
            text, process, limit, expected: as in `Phase`.
        """
        phase = Phase(text, process, limit, expected)
        with self._lock:
            self._phases.append(phase)
        try:
            yield phase
        finally:
            with self._lock:
                self._phases.remove(phase)

    def print_unless_over(self, text: str) -> None:
        """Prints a permanent line, unless the display ends within half a second."""
        with self._lock:
            self._first_lines.append(text)

    def print_line(self, text: str) -> None:
        """Prints a permanent line, above the live line."""
        with self._lock:
            self._lines.append(text)

    def print_at_end(self, lines: list[str]) -> None:
        """Adds lines to print below all others when the display ends."""
        self._last_lines += lines

    def print_result(self, text: str) -> None:
        """Prints a permanent line, unless the check has taken less than 20 seconds so far."""
        if time.monotonic() - self._start >= _LONG:
            self.print_line(text)

    def _show(self) -> None:
        live, widest = sys.stderr.isatty(), 0
        while not self._ended.wait(_EVERY):
            with self._lock:
                phases, lines = list(self._phases), self._first_lines + self._lines
                self._first_lines, self._lines = [], []
            for line in lines:
                text = f"\r{line:{widest}}" if live else line
                print(text, file=sys.stderr, flush=True)
            if live:
                columns = shutil.get_terminal_size().columns - 1
                line = "; ".join(map(str, phases))[:columns]
                widest = max(widest, len(line))
                print(f"\r{line:{widest}}", end="", file=sys.stderr, flush=True)
            else:
                for phase in phases:
                    _print_if_due(phase)
        if widest:
            print("\r" + " " * widest + "\r", end="", file=sys.stderr, flush=True)


def _print_if_due(phase: Phase) -> None:
    if phase.seconds >= phase.next_line:
        print(phase, file=sys.stderr, flush=True)
        while phase.next_line <= phase.seconds:
            phase.next_line += min(max(_SECOND - _FIRST, phase.next_line), _LONGEST)


def read_processor_seconds(process: int) -> float:
    """Returns the processor time that a process has used; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(process).cpu_times()
        return times.user + times.system
    return 0.0


def _format_roughly(seconds: float) -> str:
    """Formats a time as "45 s", "6 min" or "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _format_memory(process: int | None) -> str:
    """Returns the memory that a process uses, as text; "" if it has ended."""
    try:
        return f", {format_size(psutil.Process(process).memory_info().rss)}" if process else ""
    except psutil.Error:
        return ""
