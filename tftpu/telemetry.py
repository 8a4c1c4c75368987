"""Where the time went, and how fast the steps were."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts the seconds of a run by what they were spent on.

    Throughput is that of steps alone: the first loop, which compiles, evaluations, checkpoints
    and profiled steps are left out.
    """

    def __init__(self):
        self.started = time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)
        self._examples = 0
        self._window = (0.0, 0)  # seconds of steps and examples at the last `window_rate`

    @contextmanager
    def spend(self, on: str) -> Iterator[None]:
        """Books the time of the block under a name: "compile", "step", "eval", "checkpoint"..."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[on] += time.monotonic() - start

    def count(self, examples: int) -> None:
        """Adds the examples of steps that were booked under "step"."""
        self._examples += examples

    def rate(self) -> float:
        """Examples per second over the whole run; 0 if no step was measured."""
        seconds = self.seconds["step"]
        return self._examples / seconds if seconds else 0.0

    def window_rate(self) -> float:
        """Examples per second since the last call; of the whole run if nothing was measured."""
        seconds, examples = self._window
        self._window = (self.seconds["step"], self._examples)
        passed = self.seconds["step"] - seconds
        return (self._examples - examples) / passed if passed else self.rate()

    def wall(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self.started
