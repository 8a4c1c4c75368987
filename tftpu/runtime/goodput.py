"""Accounting of a run's time, divided into parts such as steps and evaluation, across restarts.

`goodput.json` in the workdir holds the account. It is written every few seconds, and read when a
run resumes: the time since the last entry of a run that was killed counts as lost, and so do the
steps that are repeated.
"""

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import psutil

from tftpu.storage import files, locks, side_files
from tftpu.storage.own_files import OwnFile

FILE = "goodput.json"

# The parts of a run's time: their names in files, and their names for people.
PARTS = {
    "starting": "starting",
    "compiling": "compiling, first steps",
    "input_wait": "input wait",
    "step": "step",
    "evaluation": "evaluation",
    "checkpoint_wait": "checkpoint wait",
    "profiling": "profiling",
    "restart": "between starts, repeats",
}

# The states of a run. If a run was preempted, failed or was killed, the time until its next start
# is lost. After the other states, that time belongs to no part.
RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"
PREEMPTED, FAILED = "preempted", "failed"

_log = logging.getLogger(__name__)


class Clock:
    """A clock that assigns each second of a process to one part, and measures throughput.

    The parts sum to the wall time, without the time between calls of `fit`, when no part is
    current. Throughput covers device loops, including their wait for input, except the first loop,
    which compiles, and profiled steps; evaluations and checkpoints are left out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        # None: the time belongs to no part, as between two calls of `fit`
        self._current: str | None = "starting"
        self._since = time.monotonic()
        self._examples, self._loops = 0, 0.0
        # Examples, and seconds of device loops, at the last `compute_window_rate`.
        self._window = (0, 0.0)

    def add_earlier(self, seconds: float) -> None:
        """Adds time that passed before the clock existed, such as the imports of the process."""
        with self._lock:
            self._seconds["starting"] += seconds

    def turn_to(self, part: str | None) -> str | None:
        """Makes another part the current one, and returns the previous one."""
        with self._lock:
            before = self._current
            self._book()
            self._current = part
            return before

    @contextmanager
    def spend(self, on: str) -> Iterator[None]:
        """Assigns the time of a `with` block to a part, except the time of nested blocks."""
        before = self.turn_to(on)
        try:
            yield
        finally:
            self.turn_to(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves up to `seconds` from one part to another, once the cause of a delay is known."""
        with self._lock:
            seconds = min(seconds, self._seconds[source])
            self._seconds[source] -= seconds
            self._seconds[target] += seconds

    @property
    def current(self) -> str | None:
        """The part that time is assigned to now; None: no part."""
        return self._current

    def sum_seconds(self) -> dict[str, float]:
        """Returns the seconds of each part so far."""
        with self._lock:
            self._book()
            return dict(self._seconds)

    def measure_wall(self) -> float:
        """Returns the seconds of all parts so far; time that belongs to no part is left out."""
        return sum(self.sum_seconds().values())

    def count(self, examples: int, seconds: float) -> None:
        """Adds the examples and the duration of a device loop to the throughput."""
        self._examples += examples
        self._loops += seconds

    def compute_rate(self) -> float:
        """Returns the examples per second over the whole run; 0 before the first measurement."""
        return self._examples / self._loops if self._loops else 0.0

    def compute_window_rate(self) -> float:
        """Returns the examples per second since the last call, or of the run if no loop ended."""
        rate = self.compute_current_rate()
        self._window = (self._examples, self._loops)
        return rate

    def compute_current_rate(self) -> float:
        """Returns the same rate as `compute_window_rate`, without starting a new window."""
        examples, loops = self._window
        passed = self._loops - loops
        return (self._examples - examples) / passed if passed else self.compute_rate()

    def _book(self) -> None:
        now = time.monotonic()
        if self._current is not None:
            self._seconds[self._current] += now - self._since
        self._since = now


@dataclass(frozen=True)
class Facts:
    """The progress of a run; a value that is not known yet is None.

    Attributes:
        step: steps trained.
        steps: total steps of the run.
        global_batch_size: examples of a step.
        chips: TPU chips, or devices where there is no TPU.
        eta_seconds: estimated time to the last step.
        examples_per_sec: throughput of the last steps on all chips.
        mfu: model FLOPs utilisation, from 0 to 1.
        usd: cost so far at list price.
    """

    step: int | None = None
    steps: int | None = None
    global_batch_size: int | None = None
    chips: int | None = None
    eta_seconds: float | None = None
    examples_per_sec: float | None = None
    mfu: float | None = None
    usd: float | None = None


# A longer gap in seconds between two processes, measured by a clock that people can set, does not
# count as lost time.
_LONGEST_GAP = 30 * 86_400.0


@dataclass(frozen=True)
class Record:
    """The content of `goodput.json`.

    Attributes:
        state: RUNNING, FINISHED, STOPPED, PREEMPTED or FAILED.
        process: id of the process that wrote the record.
        host: the name of its machine.
        started: when the run started first, in seconds since the epoch.
        updated: when the record was written, in seconds since the epoch.
        boot: the machine's boot id, which changes when it restarts; "" if unknown.
        uptime: the machine's uptime at `updated`, in seconds, from a clock that cannot be set.
        restarts: how many times the run resumed; processes that trained no step do not count.
        repeated_steps: steps trained again, because the run resumed from an older checkpoint.
        wall_seconds: the seconds that all processes ran, and those lost between them.
        goodput: the share of the wall time spent in steps that were not repeated.
        seconds: the seconds of each part.
        facts: the progress of the run.
        current: the part that time was assigned to at `updated`; "" for no part, or if unknown.
    """

    state: str
    process: int
    host: str
    started: float
    updated: float
    boot: str
    uptime: float
    restarts: int
    repeated_steps: int
    wall_seconds: float
    goodput: float
    seconds: dict[str, float]
    facts: Facts = field(default_factory=Facts)
    current: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the record as one flat object; facts that are None are left out."""
        record = asdict(self)
        facts = record.pop("facts")
        return record | {name: value for name, value in facts.items() if value is not None}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Record":
        """Builds a record from a JSON object with valid `_FIELDS`; drops other damaged values."""
        facts: dict[str, Any] = {f.name: _parse_number(record.get(f.name)) for f in fields(Facts)}
        for name in ("step", "steps", "global_batch_size", "chips"):
            facts[name] = facts[name] if facts[name] is None else int(facts[name])
        boot = record.get("boot")  # an older version of tftpu did not write it
        return cls(
            state=str(record["state"]),
            process=int(record["process"]),
            host=str(record["host"]),
            started=float(record["started"]),
            updated=float(record["updated"]),
            boot=boot if isinstance(boot, str) else "",
            uptime=_parse_number(record.get("uptime")) or 0.0,
            restarts=int(record["restarts"]),
            repeated_steps=int(record["repeated_steps"]),
            wall_seconds=float(record["wall_seconds"]),
            goodput=float(record["goodput"]),
            seconds={part: _parse_number(record["seconds"].get(part)) or 0.0 for part in PARTS},
            facts=Facts(**facts),
            current=str(record.get("current", "")),
        )


class Account:
    """The time account of a workdir, over all processes that trained in it.

    Args:
        workdir: local or `gs://`; None: nothing is written.
        clock: the clock of this process.

    Attributes:
        clock: the clock of this process.
        facts: the progress of the run, as last written by this process or an earlier one.
        reached: the last step known to have been trained, by this process or an earlier one.
        repeated_steps: steps trained more than once.
        continues: whether an earlier process wrote an account in the workdir.
    """

    def __init__(self, workdir: str | None, clock: Clock):
        self._workdir = workdir
        self._file = OwnFile(workdir, FILE) if workdir else None
        self.clock = clock
        earlier = _record(self._file.take(**_FIELDS)) if self._file else None
        self._lock = threading.Lock()
        start = time.time() - clock.measure_wall()
        self._started = min(earlier.started, start) if earlier else start
        self.continues = earlier is not None
        self._failed = False
        self._lost = 0.0
        if earlier and earlier.state not in (FINISHED, STOPPED):
            self._lost = _measure_gap(earlier, clock.measure_wall())
        self._earlier_seconds = earlier.seconds if earlier else dict.fromkeys(PARTS, 0.0)
        self._earlier_restarts = earlier.restarts if earlier else 0
        # A process that trains no step, as after the end of the run, keeps the earlier facts.
        self.facts = self._earlier_facts = earlier.facts if earlier else Facts()
        self.repeated_steps = earlier.repeated_steps if earlier else 0
        self.reached = self.facts.step or 0
        self._resumes, self._trained = self.reached > 0, False

    @property
    def restarts(self) -> int:
        """How many times the run resumed; a process that trained no step does not count."""
        return self._earlier_restarts + (self._resumes and self._trained)

    def count_steps(self, before: int, after: int, repeated_until: int) -> None:
        """Counts the steps from `before` to `after`; those up to `repeated_until` are repeats."""
        self._trained = True
        self.repeated_steps += max(0, min(after, repeated_until) - before)
        self.reached = max(after, self.reached)

    def add_earlier(self, seconds: float) -> None:
        """Adds seconds of this process from before its clock existed, such as its imports."""
        self.clock.add_earlier(seconds)
        self._lost = max(0.0, self._lost - seconds)
        if not self.continues:
            self._started -= seconds

    def sum_seconds(self) -> dict[str, float]:
        """Returns the seconds of each part over all processes."""
        total = {
            part: s + self._earlier_seconds[part] for part, s in self.clock.sum_seconds().items()
        }
        total["restart"] += self._lost
        return total

    def write(self, state: str, facts: Facts) -> None:
        """Writes `goodput.json`, from any thread; raises nothing, and logs only the first failure.

        Args:
            state: the state of the run: RUNNING, FINISHED, STOPPED, PREEMPTED or FAILED.
            facts: the progress of the run.
        """
        with self._lock:
            known = self._trained or state == RUNNING
            self.facts = facts if known else _merge_facts(self._earlier_facts, facts)
            if self._workdir is None or self._file is None:
                return
            seconds = self.sum_seconds()
            process, host = _name_process()
            record = Record(
                state=state,
                process=process,
                host=host,
                started=round(self._started, 3),
                updated=round(time.time(), 3),
                boot=_read_boot_id(),
                uptime=round(_read_uptime(), 3),
                restarts=self.restarts,
                repeated_steps=self.repeated_steps,
                wall_seconds=round(sum(seconds.values()), 3),
                goodput=round(compute_share(seconds, "step"), 4),
                seconds={part: round(s, 3) for part, s in seconds.items()},
                facts=self.facts,
                current=self.clock.current or "",
            )
            text = json.dumps(record.to_json(), indent=2) + "\n"
            try:
                locks.check_lock(self._workdir)
                self._file.write(text.encode())
            except Exception as error:  # a full disk or an unreachable bucket does not end the run
                if not self._failed:
                    _log.warning("%s could not be written: %s", self._file.path, error)
                self._failed = True


def _merge_facts(earlier: Facts, now: Facts) -> Facts:
    known = {name: value for name, value in asdict(now).items() if value is not None}
    return replace(earlier, **known)


def record_stop(workdir: str) -> None:
    """Records that the user stopped this process while it started, before it had an account."""
    earlier = read(workdir)
    if earlier is not None and (earlier.process, earlier.host) == _name_process():
        return
    account = Account(workdir, Clock())
    account.add_earlier(process_age())
    finished = earlier is not None and earlier.state == FINISHED
    account.write(FINISHED if finished else STOPPED, Facts())


def read(workdir: str) -> Record | None:
    """Reads `goodput.json`; returns None if it is missing or damaged."""
    return _record(side_files.read(files.join(workdir, FILE), **_FIELDS))


# The fields without which an account is damaged, with their types.
_FIELDS: dict[str, type] = {
    **{"state": str, "process": int, "host": str, "started": float, "updated": float},
    **{"restarts": int, "repeated_steps": int, "wall_seconds": float, "goodput": float},
    "seconds": dict,
}


def _record(record: dict[str, Any] | None) -> Record | None:
    return Record.from_json(record) if record else None


def _parse_number(value: Any) -> Any:
    """Returns a finite number that is not negative; None for any other value."""
    good = side_files.is_number(value) and 0 <= value < math.inf
    return value if good else None


def _measure_gap(earlier: Record, age: float) -> float:
    """Returns the seconds between the last record of an earlier process and this one's start.

    Args:
        earlier: the last record of the earlier process.
        age: seconds since this process started.
    """
    if earlier.boot and earlier.boot == _read_boot_id():
        return max(0.0, _read_uptime() - age - earlier.uptime)
    # Another machine, or this one after a restart: only clocks that people set can measure it.
    gap = time.time() - age - earlier.updated
    if gap > _LONGEST_GAP:
        _log.warning(
            "According to the clock, the last record of the run is %.0f days old. That time does "
            "not count as lost, because the clock may be wrong.",
            gap / 86_400,
        )
        return 0.0
    return max(0.0, gap)


def _name_process() -> tuple[int, str]:
    return os.getpid(), socket.gethostname()


def _read_boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def _read_uptime() -> float:
    """Returns the seconds since the machine was started; 0 if no clock shows them."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(clock) if clock is not None else 0.0


def compute_share(seconds: Mapping[str, float], part: str) -> float:
    """Returns the share of a part in the sum of all parts; 0 if the sum is 0."""
    total = sum(seconds.values())
    return seconds[part] / total if total else 0.0


def format_table(seconds: Mapping[str, float]) -> list[str]:
    """Formats the parts as lines, the largest first; omits parts without time, except "step"."""
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    shown = [(part, s) for part, s in rows if s >= 0.05 or part == "step"]
    lines = [
        f"{PARTS[part]:26}{s:10,.1f} s  {compute_share(seconds, part):6.1%}" for part, s in shown
    ]
    return [*lines, f"{'total':26}{sum(seconds.values()):10,.1f} s"]


def process_age() -> float:
    """Returns the seconds since this process was started."""
    if os.path.exists("/proc/self/stat"):  # these clocks cannot be set; exact to 10 ms
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            # The program's name may contain spaces, so fields are counted from its closing bracket.
            started = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return max(0.0, float(uptime.read().split()[0]) - started)
    return max(0.0, time.time() - psutil.Process().create_time())
