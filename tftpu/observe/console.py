"""What a run shows on a terminal: one live line. Plain lines where there is none."""

import sys
import time
from typing import NamedTuple

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from tftpu.observe import writers

# The longest a line has to be read from the side: what does not fit is left out, least first.
_LEAST_BAR = 10


class Progress(NamedTuple):
    """How far a run is. None: not known, or not yet."""

    step: int
    loss: float | None = None
    rate: float | None = None  # examples per second and chip
    mfu: float | None = None
    eta: float | None = None  # seconds
    usd: float | None = None


class Console(writers.Writer):
    """A live line where there is a terminal, plain lines where there is none.

    Args:
        steps: of the whole run.
        start: the step that the run begins at.
    """

    def __init__(self, steps: int, start: int = 0):
        self._console = RichConsole(file=sys.stdout, soft_wrap=True, highlight=False)
        self._steps = steps
        self._live = None
        self._line = LiveLine(steps, start)
        if self._console.is_terminal:
            self._live = Live(self._line, console=self._console, refresh_per_second=2)

    def start(self) -> None:
        """Draws the line from now on, until `close`."""
        if self._live:
            self._live.start()

    def phase(self, doing: str) -> None:
        """Names what the run is doing."""
        self._line.phase(doing)

    def advance(self, progress: Progress) -> None:
        """Moves the line; it is drawn twice a second."""
        self._line.progress = progress
        self._line.phase("training")

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        if split == writers.HOST or (self._live and split == "train"):
            return
        text = writers.line(step, self._steps, split, scalars)
        eta = self._line.progress.eta
        self.say(f"{text}  ETA {duration(eta)}" if split == "train" and eta else text)

    def say(self, text: str) -> None:
        """Prints a line, above the live one."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._live:
            self._line.over = True
            done = self._line.progress.step >= self._steps
            self._line.phase("trained" if done else "stopped at")
            self._live.stop()


class LiveLine:
    """The line itself, as wide as the terminal is when it is drawn."""

    def __init__(self, steps: int, start: int):
        self._steps = steps
        self._phase, self._since = "compiling", time.monotonic()
        self.progress = Progress(start)
        self.over = False

    def phase(self, doing: str) -> None:
        if doing != self._phase:
            self._phase, self._since = doing, time.monotonic()

    def text(self, width: int) -> str:
        """The line, at most `width` characters."""
        p = self.progress
        here = f"{self._phase} {p.step}/{self._steps}"
        if self._phase != "training" and not self.over:
            here += f" {duration(time.monotonic() - self._since)}"  # that it lives
        # In the order that they are given up in, where they do not fit.
        parts = {
            "loss": p.loss is not None and f"loss {p.loss:.4g}",
            "eta": p.eta is not None and not self.over and f"ETA {duration(p.eta)}",
            "rate": p.rate and f"{writers.format_number(p.rate)} ex/s/chip",
            "usd": p.usd is not None and f"${p.usd:,.2f}",
            "mfu": p.mfu is not None and f"MFU {p.mfu:.1%}",
        }
        shown = {}
        for name, part in parts.items():
            if part and len("  ".join([here, *shown.values(), part])) <= width:
                shown[name] = part
        order = ("loss", "rate", "mfu", "eta", "usd")
        line = "  ".join([here, *(shown[name] for name in order if name in shown)])
        room = width - len(line) - 2
        if room >= _LEAST_BAR:
            room = min(room, 30)
            done = round(room * min(1.0, p.step / self._steps))
            line += "  " + "━" * done + "╌" * (room - done)
        return line[:width]

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        yield Text(self.text(options.max_width), no_wrap=True, overflow="crop")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: "0:07", "12:05", "3:20:00", "2 d 03:10"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
