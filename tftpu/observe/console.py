"""Shows the progress of a run: one live line on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text

from tftpu.amounts import format_clock, format_metric, format_price
from tftpu.observe import writers
from tftpu.runtime import leaving, slow

_SHORTEST_BAR = 10
_LONGEST_BAR = 30
# Between two updates the cursor stays in the first column. If a narrow terminal has wrapped the
# line, the cursor is in its first row, so erasing everything below it removes the other rows.
_ERASE_BELOW = Segment("\x1b[J", None, [(ControlType.ERASE_IN_LINE, 0)])
_TO_FIRST_COLUMN = Control(ControlType.CARRIAGE_RETURN)


class Progress(NamedTuple):
    """The progress of a run; values that are not known yet are None.

    Attributes:
        step: steps trained.
        loss: mean loss of the last device loop.
        rate: examples per second on all devices.
        mfu: model FLOPs utilisation, from 0 to 1.
        eta: estimated seconds to the last step.
        usd: cost so far, in US dollars.
    """

    step: int
    loss: float | None = None
    rate: float | None = None
    mfu: float | None = None
    eta: float | None = None
    usd: float | None = None


class _Terminal(RichConsole):
    """A console that never hides the cursor: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Console(writers.Writer):
    """A live line on a terminal, plain lines elsewhere.

    Args:
        steps: total steps of the run; None: unknown.
        start: the step that the run starts at.
        chips: number of TPU chips, to show throughput per chip; None: the total is shown.
        live: whether to show a live line on a terminal; otherwise it also gets plain lines.
    """

    def __init__(
        self, steps: int | None, start: int = 0, chips: int | None = None, *, live: bool = True
    ):
        # Jupyter sets FORCE_COLOR, although it cannot move a cursor, as a live line needs.
        forced = None if sys.stdout.isatty() else False
        self._console = _Terminal(
            soft_wrap=True, highlight=False, force_terminal=forced, force_jupyter=False
        )
        self._steps = steps
        self._start, self._has_trained = start, False
        self._live: Live | None = None
        self._line = LiveLine(steps, start, chips)
        if live and self._console.is_terminal:
            self._live = Live(self._line, console=self._console, refresh_per_second=2)

    def start(self) -> None:
        """Starts drawing the live line, until `close`."""
        if self._live:
            leaving.note_live_line(sys.stdout.fileno())
            self._live.start()

    def show_compiling(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the train step compiles; says so if there is no live line.

        Without a terminal, the context also prints the seconds that have passed.
        """
        if self._live:
            return contextlib.nullcontext()
        self.say("Compiling the train step ...")
        if self._console.is_terminal:
            return contextlib.nullcontext()
        return slow.counting_seconds("Compiling the train step")

    def show_phase(self, doing: str) -> None:
        """Names the current activity of the run, such as "saving"."""
        self._line.set_phase(doing)

    def update_progress(self, progress: Progress) -> None:
        """Updates the live line, which is drawn twice a second."""
        self._line.progress = progress
        self._line.set_phase("training")

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        """Prints a line of scalars; a live line shows training scalars instead."""
        if split == writers.HOST:
            return
        if split == "train":
            self._line.metric = _find_metric(scalars)
            if self._live:
                return
        text = writers.format_line(step, self._steps, split, scalars)
        if split == "train":
            # The only line of a short run has means over its steps, not values of the last step.
            if step == self._steps and step - self._start > 1 and not self._has_trained:
                text += f"  (means of {step - self._start} steps)"
            self._has_trained = True
        eta = self._line.progress.eta
        self.say(f"{text}  ETA {format_clock(eta)}" if split == "train" and eta else text)

    def say(self, text: str) -> None:
        """Prints a line, above the live one."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Draws the live line for the last time."""
        if self._live:
            self._line.over = True
            done = self._steps is None or self._line.progress.step >= self._steps
            self._line.set_phase("trained" if done else "stopped at")
            self._live.stop()
            leaving.forget_live_line(sys.stdout.fileno())


class LiveLine:
    """The live line, as wide as the terminal is when it is drawn.

    Args:
        steps: total steps of the run; None: unknown.
        start: the step that the run starts at.
        chips: number of TPU chips, to show throughput per chip; None: the total is shown.

    Attributes:
        progress: the progress of the run.
        metric: name and training mean of the first metric other than the loss, once known.
        over: whether the run has ended.
    """

    def __init__(self, steps: int | None, start: int, chips: int | None = None):
        self._steps = steps
        self._chips = chips
        self._phase, self._since = "compiling", time.monotonic()
        self.progress = Progress(start)
        self.metric: tuple[str, float] | None = None
        self.over = False

    def set_phase(self, doing: str) -> None:
        """Names the current activity of the run."""
        if doing != self._phase:
            self._phase, self._since = doing, time.monotonic()

    def format_text(self, width: int) -> str:
        """Returns the line, at most `width` characters long."""
        p = self.progress
        here = f"{self._phase} {writers.format_step(p.step, self._steps)}"
        if self._phase == "training" or self.over:
            if self._steps is not None:
                here += f" {100 * min(p.step, self._steps) // self._steps}%"
        else:
            # A clock shows that the run is alive.
            here += f" {format_clock(time.monotonic() - self._since)}"
        # The least important parts come last. They are the first to be left out of a long line.
        parts = {
            "loss": f"loss {p.loss:.4g}" if p.loss is not None else "",
            "eta": f"ETA {format_clock(p.eta)}" if p.eta is not None and not self.over else "",
            "rate": self._format_rate(),
            "metric": f"{self.metric[0]} {self.metric[1]:.4g}" if self.metric else "",
            "usd": format_price(p.usd) if p.usd is not None else "",
            "mfu": f"MFU {p.mfu:.1%}" if p.mfu is not None else "",
        }
        shown: dict[str, str] = {}
        for name, part in parts.items():
            if part and len("  ".join([here, *shown.values(), part])) <= width:
                shown[name] = part
        order = ("loss", "metric", "rate", "mfu", "eta", "usd")
        line = "  ".join([here, *(shown[name] for name in order if name in shown)])
        room = width - len(line) - 2
        if room >= _SHORTEST_BAR and self._steps is not None:
            room = min(room, _LONGEST_BAR)
            done = round(room * min(1.0, p.step / self._steps))
            line += "  " + "━" * done + "╌" * (room - done)
        return line[:width]

    def _format_rate(self) -> str:
        rate = self.progress.rate
        if not rate:
            return ""
        if self._chips is None:
            return f"{format_metric(rate)} ex/s"
        return f"{format_metric(rate / self._chips)} ex/s/chip"

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        # The last column stays free, because erasing from there would remove the last character.
        yield Text(self.format_text(options.max_width - 1), no_wrap=True, overflow="crop", end="")
        yield _ERASE_BELOW
        yield _TO_FIRST_COLUMN


def _find_metric(scalars: Mapping[str, float]) -> tuple[str, float] | None:
    """Returns the first scalar that is a metric of the model and not a loss."""
    others = (*writers.CURVES_ONLY, writers.THROUGHPUT)
    for name, value in scalars.items():
        if name not in others and not name.endswith("loss"):
            return name, value
    return None
