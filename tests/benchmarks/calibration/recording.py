"""Records the order and the overlap of a compiled step's work, to price it at other prices."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.pricing.collectives import Timeline
from tftpu.preflight.pricing.instructions import SPARSE_CORE, Pricing, is_free
from tftpu.preflight.pricing.prices import PRICES, Prices
from tftpu.preflight.program.hlo import Module
from tftpu.preflight.program.loops import Runs
from tftpu.tpu.slices import Slice

_NEGLIGIBLE = 1e-3  # of a step: work that takes less keeps its price while prices are tried


@dataclasses.dataclass
class Event:
    """A call of a timeline.

    Attributes:
        does: the method of `Timeline`.
        timeline: number of the timeline.
        seconds: its time at the prices in use; of an exchange over the links, at their nominal
            bandwidth.
        key: of an exchange.
        link: of an exchange; "" for work.
        times: the number of runs per step.
        work: kind, estimate, products and traffic, as `Prices.estimate_seconds` takes them; None
            for an exchange, for a wait, and for work that takes a negligible part of the step.
    """

    does: Literal["run", "start", "wait"]
    timeline: int
    seconds: float = 0.0
    key: str = ""
    link: str = ""
    times: int = 1
    work: tuple[str, float | None, float, float] | None = None


class _Recorder(Timeline):
    """A timeline that keeps its calls."""

    def __init__(self, number: int, events: list[Event]):
        super().__init__()
        self._number, self._events = number, events

    def run(self, seconds: float) -> None:
        self._events.append(Event("run", self._number, seconds))
        super().run(seconds)

    def start(self, key: str, seconds: float, link: str = "slice") -> None:
        self._events.append(Event("start", self._number, seconds, key, link))
        super().start(key, seconds, link)

    def wait(self, key: str) -> float:
        self._events.append(Event("wait", self._number, key=key))
        return super().wait(key)


def record(step: LoweredStep, compiled: Compiled, target: Slice) -> dict[str, Any]:
    """Returns the events of a compiled step, and the seconds of its traffic at full bandwidth."""
    module = Module(compiled.text)
    numbers, events, traffic = itertools.count(), [], 0.0
    pricing = Pricing(module, step, target, lambda: _Recorder(next(numbers), events))
    clock = target.generation.clock_ghz * 1e9
    for instruction, times, computation in Runs(module).iterate():
        if is_free(module, instruction, computation):
            continue
        before = len(events)
        priced = pricing.price(instruction, times, computation)
        moved = priced.hbm_bytes / target.bytes_per_s
        traffic += moved
        estimate = priced.cycles / times / clock if priced.cycles else None
        products = priced.flops / times / target.flops_per_s
        for event in events[before:]:
            event.times = times
            if priced.kind != "collective" and event.link in ("", SPARSE_CORE):
                event.work = priced.kind, estimate, products, moved / times
            elif event.does == "run":
                event.link = "slice"
            if event.link == "slice":
                event.seconds *= PRICES.links
    return {"events": _merge(events), "traffic": traffic}


def write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    """Writes rows with their events."""
    file.write_text(json.dumps(rows, default=dataclasses.astuple))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the rows that `write_rows` wrote."""
    rows = json.loads(file.read_text())
    return [row | {"events": [Event(*event) for event in row["events"]]} for row in rows]


def _merge(events: list[Event]) -> list[Event]:
    """Returns the events with one for all negligible work in a row."""
    whole = sum(event.times * event.seconds for event in events if event.does == "run")
    found: list[Event] = []
    for event in events:
        if event.work and event.times * event.seconds < _NEGLIGIBLE * whole:
            event.work = None
        if found and _is_fixed(found[-1]) and _is_fixed(event):
            last = found[-1]
            if (last.timeline, last.times) == (event.timeline, event.times):
                last.seconds += event.seconds
                continue
        found.append(event)
    return found


def _is_fixed(event: Event) -> bool:
    """Returns whether an event is work that keeps its price."""
    return event.does == "run" and not event.work and not event.link


def predict_seconds(events: Iterable[Event], traffic: float, prices: Prices) -> float:
    """Returns the time of a recorded step at other prices.

    Args:
        events, traffic: as `record` returns them.
        prices: the prices.
    """
    timelines: dict[int, Timeline] = collections.defaultdict(Timeline)
    one_by_one = 0.0
    for event in events:
        timeline = timelines[event.timeline]
        if event.does == "wait":
            one_by_one += event.times * timeline.wait(event.key)
            continue
        if event.work:
            seconds = prices.estimate_seconds(*event.work)
        else:
            seconds = event.seconds / (prices.links if event.link == "slice" else 1.0)
        if event.does == "run":
            timeline.run(seconds)
            one_by_one += event.times * seconds
        else:
            timeline.start(event.key, seconds, event.link)
    return max(one_by_one, traffic / prices.bandwidth)
