"""Where a run's time went: every second belongs to one part, over all restarts.

`goodput.json` in the workdir holds the account. It is written every few seconds, and read when a
run is taken up again: what passed since the last entry of a run that was killed is time that was
lost, and so are the steps that are done a second time.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tftpu.storage import files

FILE = "goodput.json"

# The parts, as they are kept and as they are told.
PARTS = {
    "starting": "starting",
    "compiling": "compiling",
    "input_wait": "input wait",
    "step": "step",
    "evaluation": "evaluation",
    "checkpoint_wait": "checkpoint wait",
    "profiling": "profiling",
    "restart": "restart and repeated work",
}

# How a run stands. What passes between one of the latter two, or a running one that was killed,
# and the next start is lost time; after the others nobody waited.
RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"
PREEMPTED, FAILED = "preempted", "failed"


class Clock:
    """Books every second of a process to exactly one part, and counts what the steps did.

    The parts sum to the wall time by construction: there is always one part that time is on.
    Throughput is that of device loops alone: the first one, which compiles, evaluations,
    checkpoints and profiled steps are left out; waiting for the input is not.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._on: str | None = "starting"  # None: nobody's time, as between two calls of `fit`
        self._since = time.monotonic()
        self._examples, self._loops = 0, 0.0
        self._window = (0, 0.0)  # examples and seconds of loops at the last `window_rate`

    def started_earlier(self, seconds: float) -> None:
        """Adds what passed before there was a clock, as the imports of the process."""
        with self._lock:
            self._seconds["starting"] += seconds

    def turn_to(self, part: str | None) -> str | None:
        """Books what passed, and goes on with another part; returns the one until now."""
        with self._lock:
            before = self._on
            self._book()
            self._on = part
            return before

    @contextmanager
    def spend(self, on: str) -> Iterator[None]:
        """Books the time of the block to a part, but for what blocks within it spend."""
        before = self.turn_to(on)
        try:
            yield
        finally:
            self.turn_to(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Books seconds of one part to another: what they were is known only afterwards."""
        with self._lock:
            seconds = min(seconds, self._seconds[source])
            self._seconds[source] -= seconds
            self._seconds[target] += seconds

    def seconds(self) -> dict[str, float]:
        """The seconds of each part until now."""
        with self._lock:
            self._book()
            return dict(self._seconds)

    def wall(self) -> float:
        """Seconds since the process, or the clock, started."""
        return sum(self.seconds().values())

    def count(self, examples: int, seconds: float) -> None:
        """Adds a device loop to what throughput is taken from."""
        self._examples += examples
        self._loops += seconds

    def rate(self) -> float:
        """Examples per second over the whole run; 0 if no step was measured."""
        return self._examples / self._loops if self._loops else 0.0

    def window_rate(self) -> float:
        """Examples per second since the last call; of the whole run if nothing was measured."""
        rate = self.current_rate()
        self._window = (self._examples, self._loops)
        return rate

    def current_rate(self) -> float:
        """Examples per second since the last `window_rate`, or over the run if there were none."""
        examples, loops = self._window
        passed = self._loops - loops
        return (self._examples - examples) / passed if passed else self.rate()

    def _book(self) -> None:
        now = time.monotonic()
        if self._on is not None:
            self._seconds[self._on] += now - self._since
        self._since = now


class Account:
    """The account of one workdir over all the processes that worked in it.

    Args:
        workdir: local or `gs://`; None: nothing is kept.
        clock: of this process.
    """

    def __init__(self, workdir: str | None, clock: Clock):
        self._path = files.join(workdir, FILE) if workdir else None
        self._clock = clock
        self._earlier = (workdir and read(workdir)) or {}
        self._lock = threading.Lock()
        self.facts: dict[str, Any] = {}  # what stands beside the seconds: step, rate, price
        self.repeated_steps = self._earlier.get("repeated_steps", 0)
        self.reached = self._earlier.get("step", 0)  # the last step known to have been done
        start = time.time() - clock.wall()
        self._started = self._earlier.get("started", start)
        self._failed = False
        self._lost = 0.0
        # A clock that was set back would make the gap negative.
        if self._earlier and self._earlier["state"] not in (FINISHED, STOPPED):
            self._lost = max(0.0, start - self._earlier["updated"])

    @property
    def restarts(self) -> int:
        """How many times the run was taken up again."""
        return self._earlier["restarts"] + 1 if self._earlier else 0

    def seconds(self) -> dict[str, float]:
        """The seconds of each part over all processes."""
        earlier = self._earlier.get("seconds", {})
        total = {part: s + earlier.get(part, 0.0) for part, s in self._clock.seconds().items()}
        total["restart"] += self._lost
        return total

    def write(self, state: str) -> None:
        """Writes `goodput.json`, if that can be; also called from the thread of the telemetry."""
        if self._path is None:
            return
        with self._lock:
            seconds = self.seconds()
            record = {
                "state": state,
                "process": os.getpid(),
                "host": socket.gethostname(),
                "started": round(self._started, 3),
                "updated": round(time.time(), 3),
                "restarts": self.restarts,
                "repeated_steps": self.repeated_steps,
                "wall_seconds": round(sum(seconds.values()), 3),
                "goodput": round(share(seconds, "step"), 4),
                "seconds": {part: round(s, 3) for part, s in seconds.items()},
                **self.facts,
            }
            try:
                files.write_whole(self._path, (json.dumps(record, indent=2) + "\n").encode())
            except Exception as error:  # a full disk, a bucket that is away: no reason to end
                if not self._failed:
                    logging.warning("%s could not be written: %s", self._path, error)
                self._failed = True


def read(workdir: str) -> dict[str, Any] | None:
    """What `goodput.json` holds; None if there is none, or none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(files.read(files.join(workdir, FILE)))
        if isinstance(record, dict) and "state" in record:
            return record
    return None


def share(seconds: dict[str, float], part: str) -> float:
    """The share of a part in the whole; 0 of nothing."""
    whole = sum(seconds.values())
    return seconds[part] / whole if whole else 0.0


def table(seconds: dict[str, float]) -> list[str]:
    """The account in lines, the largest part first; what took no time is left out."""
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    shown = [(part, s) for part, s in rows if s >= 0.05]
    lines = [f"{PARTS[part]:26}{s:10,.1f} s  {share(seconds, part):6.1%}" for part, s in shown]
    return [*lines, f"{'whole':26}{sum(seconds.values()):10,.1f} s"]


def process_age() -> float:
    """Seconds since this process was started."""
    if os.path.exists("/proc/self/stat"):  # by clocks that nobody sets, to 10 ms
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            # The name of the program may hold spaces: the fields after it count from its bracket.
            started = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return max(0.0, float(uptime.read().split()[0]) - started)
    return max(0.0, time.time() - psutil.Process().create_time())
