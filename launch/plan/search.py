"""The search of a plan: which candidate to compile next, which to prune, and which is best.

It reads no clock and no file: `choose_next` returns a candidate, and `record` takes its verdict.
Besides the bounds, a verdict on a candidate prunes other candidates of the same slice:

- If it does not fit, neither does one that recomputes as little or less, in as few microbatches or
  fewer, on a mesh that shards the model as much or less. A single microbatch still may fit, because
  it keeps no sums of gradients. If flash attention does not fit, plain attention, which keeps its
  scores, does not either.
- If it fits, one with the same mesh and attention that recomputes as much, in as many microbatches
  or more, is no faster; nor is one that recomputes more, if the one that fits needs little memory
  or the other's estimated time is no shorter.
"""

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping

from tftpu.amounts import format_period, format_price
from tftpu.blocks import REMATS
from tftpu.config.mesh import DATA, FSDP, parse_mesh
from tftpu.launch.plan.bounds import Estimate
from tftpu.launch.plan.candidates import Candidate

# Kinds of rematerialization, from the one that keeps most activations.
_BY_MEMORY = ("none", "products", "attention", "block", "offload")
assert sorted(_BY_MEMORY) == sorted(REMATS)

# Shares of a device's memory: a program below the first should fit, one below the second is small.
_ROOM, _SMALL = 0.7, 0.25

STATE = "with weights, optimizer state and inputs of blocks that alone exceed the memory"
OVER_BUDGET = "over the budget even at the chip's peak"
TOO_SLOW = "too slow even at the chip's peak"
NO_CHEAPER = "no cheaper than the best even at the chip's peak"
NO_FASTER = "no faster than the best even at the chip's peak"
NEEDS_MORE = "larger than a candidate that does not fit"
SLOWER = "with more work than one that fits, and expected to be no faster"


@dataclasses.dataclass(frozen=True)
class Goal:
    """The aim of a plan, for a run of some length.

    Without a limit it is the cheapest run, with a deadline the cheapest that ends in time, and with
    a budget the fastest that costs no more.

    Attributes:
        steps: the length of the run, in steps.
        budget: dollars for the run; None for no limit.
        deadline: seconds for the run; None for no limit.
        tokens: the number of tokens in a global batch; None if the examples are not tokens.
    """

    steps: int
    budget: float | None = None
    deadline: float | None = None
    tokens: int | None = None

    def rank(self, step_seconds: float, usd_hour: float) -> tuple[bool, float, float]:
        """Returns a sort key of a run, lowest for the best: (misses the limit, amount, amount).

        The amounts are dollars and seconds: first the limited one if the run misses the limit,
        otherwise the one to minimize.
        """
        seconds = self.steps * step_seconds
        usd = usd_hour * seconds / 3600
        if self.budget is not None:
            return (True, usd, seconds) if usd > self.budget else (False, seconds, usd)
        if self.deadline is not None and seconds > self.deadline:
            return True, seconds, usd
        return False, usd, seconds

    def price_tokens(self, step_seconds: float, usd_hour: float) -> float | None:
        """Returns the dollars for 1 billion tokens; None if the examples are not tokens."""
        return usd_hour * step_seconds / 3600 / self.tokens * 1e9 if self.tokens else None

    @property
    def miss(self) -> str:
        """The remark on a run that misses the limit: "too slow" or "over budget"."""
        return "too slow" if self.budget is None else "over budget"

    @property
    def aim(self) -> str:
        """The aim, such as "the fastest for at most $50.00"."""
        return f"the {'fastest' if self.budget is not None else 'cheapest'}{self.limit}"

    @property
    def limit(self) -> str:
        """The limit as a clause, such as " for at most $50.00"; "" without a limit."""
        if self.budget is not None:
            return f" for at most {format_price(self.budget)}"
        return "" if self.deadline is None else f" in at most {format_period(self.deadline)}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Preflight's verdict on a candidate.

    Attributes:
        fits: whether it can run.
        hbm_bytes: bytes of a device's memory that it needs; 0 if that is not known.
        host_bytes: bytes of host memory that the program of one device keeps.
        step_seconds: predicted time of a step; None if it does not fit or cannot be priced.
        step_seconds_low, step_seconds_high: the ends of the range of that time.
        mfu: model FLOPs utilization: model FLOP/s divided by the bfloat16 peak.
        error: why it cannot run.
        too_large: whether it compiles, but needs more memory than a device has.
    """

    fits: bool
    hbm_bytes: int = 0
    host_bytes: int = 0
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    mfu: float | None = None
    error: str = ""
    too_large: bool = False


class Search:
    """A search over candidates.

    Args:
        estimates: the candidates with their bounds and estimates.
        goal: the aim of the plan.
        own: the candidates with the config's settings; the most promising of them is tried first.
        named: the slices that the user named; each gets a price if a candidate fits there and
            keeps the limit.

    Attributes:
        verdicts: the verdicts by candidate, in the order of their recording.
        pruned: the reasons why candidates need no compiling, by candidate.
    """

    def __init__(
        self,
        estimates: Iterable[Estimate],
        goal: Goal,
        own: Collection[Candidate] = (),
        named: Collection[str] = (),
    ):
        self.goal = goal
        self._own = set(own)  # empty once one of them was chosen
        self._named = set(named)  # a slice is removed when it has a price
        self._estimates = {one.candidate: one for one in estimates}
        # The largest number of bytes by which a program exceeded its estimate, negative if none
        # did, times `_count_parts`; by the key of `_name_memory`.
        self._uncounted: dict[tuple[str, str, str], int] = {}
        # Ratios of predicted times to estimated ones, by slice, for each kind of attention, because
        # estimates leave out the scores of plain attention.
        self._paces: dict[str, dict[str, list[float]]] = {}
        # Slices on which the attention kernel may run: none of its programs failed to compile.
        self._kernels = {one.slice for one in self._estimates if one.attention == "flash"}
        self._waiting = sorted(self._estimates.values(), key=self.rank_likely)
        self._running: set[Candidate] = set()
        self.verdicts: dict[Candidate, Verdict] = {}
        self.pruned: dict[Candidate, str] = {}
        self._prune()

    @property
    def size(self) -> int:
        """The number of all candidates."""
        return len(self._estimates)

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates."""
        return list(self._estimates)

    @property
    def running(self) -> int:
        """The number of candidates that are being compiled."""
        return len(self._running)

    @property
    def left(self) -> int:
        """The number of candidates that wait or are being compiled."""
        return len(self._waiting) + len(self._running)

    def choose_next(self) -> Candidate | None:
        """Returns the most promising candidate, and marks it as running; None if there is none.

        Candidates on an idle slice and mesh come first, because the verdict on a running one
        decides about others there. Otherwise it must need less memory than those running there.
        Until a candidate fits, idle slices come first, because compilers are several times as fast
        for some generations as for others. After that, named slices without a price come first.
        """
        self._prune()
        busy = {(one.slice, one.mesh) for one in self._running}
        slices = {one.slice for one in self._running}
        bar = self._find_bar()
        # A candidate that cannot be the best, but gives its slice a price, waits for an idle slice.
        waiting = [
            e for e in self._waiting if e.candidate.slice not in slices or self._rank_least(e) < bar
        ]
        free = [e for e in waiting if (e.candidate.slice, e.candidate.mesh) not in busy]
        free = free or [e for e in waiting if self._may_replace_running(e.candidate)]
        if not any(verdict.fits for verdict in self.verdicts.values()):
            free.sort(key=lambda e: (self.rank_likely(e)[0], e.candidate.slice in slices))
        else:
            free.sort(key=lambda e: e.candidate.slice not in self._named - slices)
        chosen = next(iter(free), None)
        if chosen is None:
            return None
        self._waiting.remove(chosen)
        self._running.add(chosen.candidate)
        if chosen.candidate in self._own:
            self._own.clear()
            self._waiting.sort(key=self.rank_likely)
        return chosen.candidate

    def _may_replace_running(self, candidate: Candidate) -> bool:
        """Returns whether a candidate may fit if those running on its mesh are likely too large."""
        place = candidate.slice, candidate.mesh
        return all(
            self._expect_bytes(self._estimates[one]) > _ROOM * self._estimates[one].limit_bytes
            and (_keeps_less(candidate, one) or candidate.microbatches > one.microbatches)
            for one in self._running
            if (one.slice, one.mesh) == place
        )

    def record_known(self, known: Mapping[Candidate, Verdict]) -> None:
        """Records the verdicts of an earlier plan."""
        self._waiting = [one for one in self._waiting if one.candidate not in known]
        if not self._own.isdisjoint(known):
            self._own.clear()
        for one, verdict in known.items():
            if self.has_candidate(one):
                self.pruned.pop(one, None)
                self._note(one, verdict)
        self._waiting.sort(key=self.rank_likely)

    def record(self, candidate: Candidate, verdict: Verdict) -> None:
        """Records the verdict on a candidate that was running."""
        self._running.discard(candidate)
        self.pruned.pop(candidate, None)  # it was pruned just before it ended
        self._note(candidate, verdict)
        self._waiting.sort(key=self.rank_likely)
        self._prune()

    def _note(self, candidate: Candidate, verdict: Verdict) -> None:
        self.verdicts[candidate] = verdict
        known = verdict.fits or verdict.too_large or verdict.hbm_bytes
        if candidate.attention == "flash" and not known:
            self._kernels.discard(candidate.slice)
        if verdict.step_seconds:
            self._named.discard(candidate.slice)
            pace = verdict.step_seconds / self._estimates[candidate].likely_seconds
            paces = self._paces.setdefault(candidate.attention, {})
            paces.setdefault(candidate.slice, []).append(pace)
        if verdict.hbm_bytes:
            above = verdict.hbm_bytes - self._estimates[candidate].likely_bytes
            group, above = _name_memory(candidate), above * _count_parts(candidate)
            self._uncounted[group] = max(self._uncounted.get(group, above), above)

    def list_promising(self) -> list[Estimate]:
        """Returns, for each slice, the candidate that will be compiled first there."""
        found: dict[str, Estimate] = {}
        for one in self._waiting:
            found.setdefault(one.candidate.slice, one)
        return list(found.values())

    def find_promising(self) -> Estimate | None:
        """Returns the most promising candidate that is neither pruned nor judged yet, or None."""
        left = (one for candidate, one in self._estimates.items() if self._is_open(candidate))
        return min(left, key=self.rank_likely, default=None)

    def list_unpriced(self) -> dict[str, Estimate | collections.Counter[str]]:
        """Maps each slice on which no candidate fits yet to the most promising one left there.

        If none is left, maps the slice to the number of pruned candidates by reason, which is
        empty if all were compiled.
        """
        priced = {one.slice for one, verdict in self.verdicts.items() if verdict.fits}
        found: dict[str, Estimate | collections.Counter[str]] = {}
        for name in dict.fromkeys(one.slice for one in self._estimates):
            if name in priced:
                continue
            left = [e for c, e in self._estimates.items() if c.slice == name and self._is_open(c)]
            reasons = collections.Counter(r for c, r in self.pruned.items() if c.slice == name)
            found[name] = min(left, key=self.rank_likely) if left else reasons
        return found

    def _is_open(self, candidate: Candidate) -> bool:
        return candidate not in self.verdicts and candidate not in self.pruned

    def has_candidate(self, candidate: Candidate) -> bool:
        """Returns whether a candidate is one of the candidates of the search."""
        return candidate in self._estimates

    def has_slice(self, name: str) -> bool:
        """Returns whether there are candidates for a slice."""
        return any(one.slice == name for one in self._estimates)

    def list_best(self) -> list[Candidate]:
        """Returns the candidates that fit and have a price, the best first."""
        priced = [one for one, verdict in self.verdicts.items() if verdict.step_seconds]
        return sorted(priced, key=self.rank)

    def list_firsts(self) -> list[Candidate]:
        """Returns the best candidate of each slice, the best first."""
        firsts: dict[str, Candidate] = {}
        for one in self.list_best():
            firsts.setdefault(one.slice, one)
        return list(firsts.values())

    def rank(self, candidate: Candidate) -> tuple[bool, float, float]:
        """Returns the sort key of a candidate that has a price; see `Goal.rank`."""
        seconds = self.verdicts[candidate].step_seconds
        return self.goal.rank(seconds or math.inf, self.find_usd_hour(candidate))

    def meets_goal(self, candidate: Candidate) -> bool:
        """Returns whether a candidate that has a price keeps the goal's budget or deadline."""
        return not self.rank(candidate)[0]

    def find_usd_hour(self, candidate: Candidate) -> float:
        """Returns the dollars for an hour of a candidate's slice."""
        return self._estimates[candidate].usd_hour

    def find_least(self, name: str) -> tuple[float, float]:
        """Returns the seconds of a slice's fastest step at peak speed, and its dollars per hour."""
        least = [
            e
            for e in self._estimates.values()
            if e.candidate.slice == name and self.pruned.get(e.candidate) != STATE
        ]
        return min(e.least_seconds for e in least), least[0].usd_hour

    def count_pruned(self) -> dict[str, int]:
        """Returns how many candidates were pruned for each reason, the most first."""
        return dict(collections.Counter(self.pruned.values()).most_common())

    def rank_likely(
        self, one: Estimate
    ) -> tuple[bool, bool, bool, bool, bool, bool, tuple[bool, float, float]]:
        """Returns a sort key of a candidate, lowest for the most promising one."""
        candidate = one.candidate
        likely = self.goal.rank(self.expect_seconds(one), one.usd_hour)
        # Estimates count no scores of plain attention, which usually make it slower than the
        # kernel.
        is_plain = candidate.attention == "plain" and candidate.slice in self._kernels
        too_large = self._expect_bytes(one) > one.limit_bytes
        changed = candidate not in self._own
        # "offload" does the work of "block", and takes twice as long to compile.
        on_host = candidate.remat == "offload"
        # For a small model, the verdict on a candidate that keeps all activations prunes others.
        keeps_all = candidate.remat == "none" and self._expect_bytes(one) < _SMALL * one.limit_bytes
        return too_large, likely[0], changed, is_plain, on_host, not keeps_all, likely

    def expect_seconds(self, one: Estimate) -> float:
        """Returns the estimated seconds of a step, corrected by the errors of earlier estimates.

        The correction is the median ratio of predicted to estimated times among the compiled
        candidates with the same kind of attention: those on this slice or, without any, all.
        """
        by_slice = self._paces.get(one.candidate.attention, {})
        all_paces = itertools.chain.from_iterable(by_slice.values())
        paces = by_slice.get(one.candidate.slice) or list(all_paces)
        pace = statistics.median(paces) if paces else 1.0
        return max(pace * one.likely_seconds, one.least_seconds)

    def _expect_bytes(self, one: Estimate) -> float:
        candidate = one.candidate
        uncounted = self._uncounted.get(_name_memory(candidate), 0) / _count_parts(candidate)
        return one.likely_bytes + uncounted

    def _find_bar(self) -> tuple[bool, float, float]:
        """Returns the rank of the best candidate so far; without one, the worst possible rank."""
        best = next(iter(self.list_best()), None)
        return self.rank(best) if best else (True, math.inf, math.inf)

    def _rank_least(self, one: Estimate) -> tuple[bool, float, float]:
        """Returns the rank that a candidate would have at the chip's peak."""
        return self.goal.rank(one.least_seconds, one.usd_hour)

    def _prune(self) -> None:
        bar = self._find_bar()
        for candidate in list(self._running):
            if reason := self._find_reason(self._estimates[candidate], bar):
                self.pruned[candidate] = reason
                self._running.discard(candidate)
        kept = []
        for one in self._waiting:
            reason = self._find_reason(one, bar)
            if reason:
                self.pruned[one.candidate] = reason
            else:
                kept.append(one)
        self._waiting = kept

    def _find_reason(self, one: Estimate, bar: tuple[bool, float, float]) -> str:
        """Returns why a candidate needs no compiling; "" if it must be compiled.

        Args:
            one: the candidate.
            bar: the rank of the best candidate so far.
        """
        if one.least_bytes > one.limit_bytes:
            return STATE
        least = self._rank_least(one)
        if least[0]:
            return TOO_SLOW if self.goal.budget is None else OVER_BUDGET
        if least >= bar and one.candidate.slice not in self._named:
            return NO_CHEAPER if self.goal.budget is None else NO_FASTER
        for other, verdict in self.verdicts.items():
            if verdict.too_large and self._needs_more(one, other, verdict):
                return NEEDS_MORE
            if verdict.step_seconds and _does_more(one.candidate, other):
                # Recomputing more may be faster, because it saves memory traffic, but not if there
                # is little of it. "offload" recomputes as "block", and also copies to the host.
                known = one.candidate.remat in (other.remat, "offload")
                small = verdict.hbm_bytes < _SMALL * one.limit_bytes
                if known or small or self.expect_seconds(one) >= verdict.step_seconds:
                    return SLOWER
        return ""

    def _needs_more(self, one: Estimate, other: Candidate, verdict: Verdict) -> bool:
        """Returns whether a candidate cannot fit, because another one did not."""
        mine = one.candidate
        if mine.slice != other.slice or _keeps_less(mine, other):
            return False
        if mine.microbatches == 1 < other.microbatches:  # one microbatch keeps no gradient sums
            return False
        if mine.microbatches <= other.microbatches:
            return _cuts_no_more(mine.mesh, other.mesh)
        # Memory beside the state shrinks at most in proportion to the microbatches.
        rest = verdict.hbm_bytes - self._estimates[other].state_bytes
        least = one.state_bytes + rest * other.microbatches / mine.microbatches
        return mine.mesh == other.mesh and least > one.limit_bytes


def _name_group(candidate: Candidate) -> tuple[str, str, str]:
    return candidate.slice, candidate.mesh, candidate.attention


def _name_memory(candidate: Candidate) -> tuple[str, str, str]:
    """Returns a key of candidates that likely exceed their estimated memory by the same amount.

    Activations are spread over all devices on any mesh; copies of weights depend on the mesh.
    """
    place = candidate.remat if _keeps_activations(candidate) else candidate.mesh
    return candidate.slice, place, candidate.attention


def _count_parts(candidate: Candidate) -> int:
    """Returns the number of microbatches, or 1 if it does not affect memory beyond the estimate."""
    return candidate.microbatches if _keeps_activations(candidate) else 1


def _keeps_activations(candidate: Candidate) -> bool:
    return candidate.remat in ("none", "products")


def _keeps_less(one: Candidate, other: Candidate) -> bool:
    """Returns whether a candidate may keep fewer activations than another."""
    attention = one.attention != other.attention and one.attention == "flash"
    return attention or _BY_MEMORY.index(one.remat) > _BY_MEMORY.index(other.remat)


def _does_more(one: Candidate, other: Candidate) -> bool:
    """Returns whether a candidate differs from another only by more microbatches or recomputing."""
    return (
        _name_group(one) == _name_group(other)
        and one.microbatches >= other.microbatches
        and _BY_MEMORY.index(one.remat) >= _BY_MEMORY.index(other.remat)
    )


def _cuts_no_more(one: str, other: str) -> bool:
    """Returns whether a mesh equals another, or differs by a smaller `fsdp` and larger `data`."""
    if one == other:
        return True
    mine, theirs = parse_mesh(one), parse_mesh(other)
    batch = [sizes.get(DATA, 1) * sizes.get(FSDP, 1) for sizes in (mine, theirs)]
    rest = [
        {axis: n for axis, n in sizes.items() if axis not in (DATA, FSDP)}
        for sizes in (mine, theirs)
    ]
    return batch[0] == batch[1] and rest[0] == rest[1] and mine.get(FSDP, 1) <= theirs.get(FSDP, 1)
