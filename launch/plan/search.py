"""The search of a plan: what to compile next, what needs no compiling, and what is best.

It reads no clock and no file: a candidate is taken by `choose_next`, and its verdict is recorded.
Beside the closed forms, a verdict decides about others of the same slice:

- What recomputes as little or less, in as few microbatches or fewer, on a mesh that cuts the model
  as much or less, does not fit if a candidate did not fit. Nor does plain attention, which keeps
  its scores, where flash attention did not fit.
- What recomputes as much or more, in as many microbatches or more, is no faster than a candidate
  with the same mesh and attention that fits.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

from tftpu.blocks import REMATS
from tftpu.config.mesh import DATA, FSDP, parse_mesh
from tftpu.launch.plan.bounds import Estimate
from tftpu.launch.plan.candidates import Candidate

# From the one that keeps most, and is the fastest.
_BY_MEMORY = ("none", "products", "block", "offload")
assert sorted(_BY_MEMORY) == sorted(REMATS)

STATE = "weights, optimizer's state and inputs of blocks do not fit"
OVER_BUDGET = "over the budget even at the chip's peak"
TOO_SLOW = "too slow even at the chip's peak"
NO_BETTER = "no better than the best even at the chip's peak"
NEEDS_MORE = "need more memory than one that does not fit"
SLOWER = "do more work than one that fits"


@dataclasses.dataclass(frozen=True)
class Goal:
    """The aim of a plan, for a run of some length.

    Without a limit it is the cheapest run, with a deadline the cheapest that ends in time, and with
    a budget the fastest that costs no more.

    Attributes:
        steps: the length of the run.
        budget: dollars for the run; None: no limit.
        deadline: seconds for the run; None: no limit.
    """

    steps: int
    budget: float | None = None
    deadline: float | None = None

    def rank(self, step_seconds: float, usd_hour: float) -> tuple[bool, float, float]:
        """Returns the rank of a run, the lowest of the best: (misses the limit, first, second)."""
        seconds = self.steps * step_seconds
        usd = usd_hour * seconds / 3600
        if self.budget is not None:
            return usd > self.budget, seconds, usd
        return self.deadline is not None and seconds > self.deadline, usd, seconds

    @property
    def miss(self) -> str:
        """The remark on a run that misses the limit."""
        return "too slow" if self.budget is None else "over budget"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Preflight's verdict on a candidate.

    Attributes:
        fits: whether it can run.
        hbm_bytes: bytes of a device's memory that it needs; 0 if that is not known.
        host_bytes: bytes of its host's memory that a device's program keeps.
        step_seconds: predicted time of a step; None if it does not fit or cannot be priced.
        error: why it cannot run.
        too_large: whether it needs too much memory.
    """

    fits: bool
    hbm_bytes: int = 0
    host_bytes: int = 0
    step_seconds: float | None = None
    error: str = ""
    too_large: bool = False


class Search:
    """A search over candidates.

    Args:
        estimates: the candidates with their closed forms.
        goal: what is looked for.

    Attributes:
        verdicts: the verdicts by candidate, in their order.
        pruned: why candidates were not compiled.
    """

    def __init__(self, estimates: Iterable[Estimate], goal: Goal):
        self.goal = goal
        self._estimates = {one.candidate: one for one in estimates}
        self._waiting = sorted(self._estimates.values(), key=self._rank_likely)
        self._running: set[Candidate] = set()
        self.verdicts: dict[Candidate, Verdict] = {}
        self.pruned: dict[Candidate, str] = {}

    @property
    def size(self) -> int:
        """The number of all candidates."""
        return len(self._estimates)

    @property
    def left(self) -> int:
        """The number of candidates about which nothing is known."""
        return len(self._waiting) + len(self._running)

    def choose_next(self) -> Candidate | None:
        """Returns the most promising candidate, which counts as running, or None.

        None is left then, or those that are wait for what runs on the same slice with the same
        mesh, as its verdict decides about them.
        """
        self._prune()
        busy = {(one.slice, one.mesh) for one in self._running}
        free = (e for e in self._waiting if (e.candidate.slice, e.candidate.mesh) not in busy)
        chosen = next(free, None)
        if chosen is None:
            return None
        self._waiting.remove(chosen)
        self._running.add(chosen.candidate)
        return chosen.candidate

    def choose_unknown(self, known: Mapping[Candidate, Verdict]) -> Candidate | None:
        """Returns the most promising candidate without a known verdict; records the known ones."""
        while (candidate := self.choose_next()) is not None and candidate in known:
            self.record(candidate, known[candidate])
        return candidate

    def record(self, candidate: Candidate, verdict: Verdict) -> None:
        """Records the verdict on a candidate that was running."""
        self._running.discard(candidate)
        self.verdicts[candidate] = verdict

    def has_slice(self, name: str) -> bool:
        """Returns whether there are candidates for a slice."""
        return any(one.slice == name for one in self._estimates)

    def list_best(self) -> list[Candidate]:
        """Returns the candidates that fit and have a price, the best first."""
        priced = [one for one, verdict in self.verdicts.items() if verdict.step_seconds]
        return sorted(priced, key=self.rank)

    def rank(self, candidate: Candidate) -> tuple[bool, float, float]:
        """Returns the rank of a candidate that has a price."""
        seconds = self.verdicts[candidate].step_seconds
        return self.goal.rank(seconds or math.inf, self.find_usd_hour(candidate))

    def meets_goal(self, candidate: Candidate) -> bool:
        """Returns whether a candidate that has a price keeps the limit."""
        return not self.rank(candidate)[0]

    def find_usd_hour(self, candidate: Candidate) -> float:
        """Returns the dollars for an hour of a candidate's slice."""
        return self._estimates[candidate].usd_hour

    def count_pruned(self) -> dict[str, int]:
        """Returns how many candidates were pruned for each reason, the most first."""
        return dict(collections.Counter(self.pruned.values()).most_common())

    def _rank_likely(self, one: Estimate) -> tuple[bool, tuple[bool, float, float], bool]:
        likely = self.goal.rank(one.likely_seconds, one.usd_hour)
        return one.likely_bytes > one.limit_bytes, likely, one.candidate.attention != "flash"

    def _prune(self) -> None:
        best = next(iter(self.list_best()), None)
        bar = self.rank(best) if best else (True, math.inf, math.inf)
        kept = []
        for one in self._waiting:
            reason = self._find_reason(one, bar)
            if reason:
                self.pruned[one.candidate] = reason
            else:
                kept.append(one)
        self._waiting = kept

    def _find_reason(self, one: Estimate, bar: tuple[bool, float, float]) -> str:
        """Returns why a candidate needs no compiling, "" if it does.

        Args:
            one: the candidate.
            bar: the rank of the best so far.
        """
        if one.least_bytes > one.limit_bytes:
            return STATE
        least = self.goal.rank(one.least_seconds, one.usd_hour)
        if least[0]:
            return TOO_SLOW if self.goal.budget is None else OVER_BUDGET
        if least >= bar:
            return NO_BETTER
        for other, verdict in self.verdicts.items():
            if verdict.too_large and self._needs_more(one, other, verdict):
                return NEEDS_MORE
            if verdict.step_seconds and _does_more(one.candidate, other):
                return SLOWER
        return ""

    def _needs_more(self, one: Estimate, other: Candidate, verdict: Verdict) -> bool:
        """Returns whether a candidate cannot fit, as another did not."""
        mine = one.candidate
        if mine.slice != other.slice or _keeps_less(mine, other):
            return False
        if mine.microbatches <= other.microbatches:
            return _cuts_no_more(mine.mesh, other.mesh)
        # What is not the state shrinks at most as the microbatches do.
        rest = verdict.hbm_bytes - self._estimates[other].state_bytes
        least = one.state_bytes + rest * other.microbatches / mine.microbatches
        return mine.mesh == other.mesh and least > one.limit_bytes


def _name_group(candidate: Candidate) -> tuple[str, str, str]:
    return candidate.slice, candidate.mesh, candidate.attention


def _keeps_less(one: Candidate, other: Candidate) -> bool:
    """Returns whether a candidate may keep fewer activations than another."""
    attention = one.attention != other.attention and one.attention == "flash"
    return attention or _BY_MEMORY.index(one.remat) > _BY_MEMORY.index(other.remat)


def _does_more(one: Candidate, other: Candidate) -> bool:
    """Returns whether a candidate does the work of another, and recomputes or repeats more."""
    return (
        _name_group(one) == _name_group(other)
        and one.microbatches >= other.microbatches
        and _BY_MEMORY.index(one.remat) >= _BY_MEMORY.index(other.remat)
    )


def _cuts_no_more(one: str, other: str) -> bool:
    """Returns whether a mesh is another, or shares the batch alike with no more of it on `fsdp`."""
    if one == other:
        return True
    mine, theirs = parse_mesh(one), parse_mesh(other)
    batch = [sizes.get(DATA, 1) * sizes.get(FSDP, 1) for sizes in (mine, theirs)]
    rest = [
        {axis: n for axis, n in sizes.items() if axis not in (DATA, FSDP)}
        for sizes in (mine, theirs)
    ]
    return batch[0] == batch[1] and rest[0] == rest[1] and mine.get(FSDP, 1) <= theirs.get(FSDP, 1)
