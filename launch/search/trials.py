"""The trials of a study: their attributes, and the claims by which one worker runs each of them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from tftpu.launch.search import space
from tftpu.launch.search.plan import Plan, check_overrides
from tftpu.launch.search.watch import Watch
from tftpu.storage import claims, files
from tftpu.storage.owner import HeldError, LostError, refusal

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
# Attributes of a trial, and of a study.
OVERRIDES = "overrides"  # what it draws, as words of a command line
BEHIND = "behind"  # its pruner gave it up
WHY = "why"  # it was pruned or failed
USD = "usd"  # what it costs on the slice of the plan, as preflight says
STOPPED_AT = "stopped_at_usd"  # the budget that the next trial did not fit


@dataclasses.dataclass
class Taken:
    """A trial that this process has claimed.

    Attributes:
        trial: of Optuna.
        frozen: what was known of it when it was taken.
        words: overrides that it draws.
        resumed: whether another worker has begun it.
        claim: held until it is closed.
    """

    trial: optuna.Trial
    frozen: FrozenTrial
    words: list[str]
    resumed: bool
    claim: contextlib.ExitStack


class Trials:
    """The trials of a search, for one machine.

    Args:
        plan: of the search.
        workdir: of the search, local or `gs://`.
        study: of Optuna.
        dimensions: of the space.
    """

    def __init__(
        self, plan: Plan, workdir: str, study: optuna.Study, dimensions: Sequence[space.Dimension]
    ):
        self._plan, self._workdir, self._study = plan, workdir, study
        self._dimensions = dimensions
        self._watch = Watch()

    @property
    def over(self) -> bool:
        """True once all trials have ended, or those that the budget pays for."""
        if self.count(FINISHED) >= self._plan.trials:
            return True
        return self._over_budget() and not any(map(self._may_run, self._running()))

    def count(self, states: Sequence[TrialState]) -> int:
        """Returns the number of trials in some states."""
        return len(self._study.get_trials(deepcopy=False, states=tuple(states)))

    def folder(self, number: int) -> str:
        """Returns the folder of a trial."""
        return files.join(self._workdir, "trials", f"{number:04d}")

    def run(self, number: int) -> str:
        """Returns the workdir of a trial's run."""
        return files.join(self.folder(number), "run")

    def take(self, own: set[int]) -> Taken | None:
        """Claims a trial: one whose worker is gone, or a new one; None if there is none now.

        It waits for no other machine: all threads of this process wait for it.

        Args:
            own: numbers of the trials that this process runs, whose claims do not exclude it.
        """
        taken = self._left_behind(own)
        if taken is not None or self._over_budget() or not self._wanted():
            return taken
        try:
            with self._asking():
                return self._new() if self._wanted() else None
        except HeldError:  # another machine asks at this moment
            return None

    def lost(self, number: int) -> bool:
        """Returns whether another worker may have taken a trial that this process claimed."""
        try:
            claims.check(self._worker(number))
        except (LostError, OSError):  # it was suspended, or the bucket was out of reach
            return True
        return False

    def finished(self, number: int) -> bool:
        """Returns whether a trial has ended."""
        return self._frozen(number).state in FINISHED

    def twin(self, taken: Taken) -> FrozenTrial | None:
        """Returns a trial with the same overrides that is complete or pruned; None without one."""
        over = (TrialState.COMPLETE, TrialState.PRUNED)
        for trial in self._study.get_trials(deepcopy=False, states=over):
            if trial.user_attrs.get(OVERRIDES) == taken.words:
                return trial
        return None

    def affords(self, trial: optuna.Trial, usd: float) -> bool:
        """Books what a trial costs; returns False, and ends the search, if the budget is exceeded.

        Raises:
            HeldError: another machine asks at this moment.
        """
        with self._asking():
            others = [t for t in self._study.get_trials(deepcopy=False) if t.number != trial.number]
            spent = sum(t.user_attrs.get(USD, 0.0) for t in others)
            budget = self._plan.budget_usd
            if budget is not None and spent + usd > budget:
                self._study.set_user_attr(STOPPED_AT, budget)
                return False
            trial.set_user_attr(USD, usd)
            return True

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Excludes other machines while a trial is created or booked; raises HeldError at once."""
        place = files.join(self._workdir, "asking")
        if not self._watch.free(place):
            raise refusal(place, None)
        with claims.claim(place):
            yield

    def _wanted(self) -> bool:
        return self.count(tuple(TrialState)) < self._plan.trials

    def _over_budget(self) -> bool:
        stopped, budget = self._study.user_attrs.get(STOPPED_AT), self._plan.budget_usd
        return stopped is not None and budget is not None and budget <= stopped

    def _running(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _may_run(self, frozen: FrozenTrial) -> bool:
        """Returns whether the budget allows a trial that has begun: it is booked, or none is."""
        return USD in frozen.user_attrs or not self._over_budget()

    def _left_behind(self, own: set[int]) -> Taken | None:
        for frozen in self._running():
            number = frozen.number
            if number in own or not self._may_run(frozen):
                continue
            claim = self._claimed(number) if self._watch.free(self._worker(number)) else None
            if claim is None:
                continue
            with contextlib.ExitStack() as refused:
                refused.push(claim)
                frozen = self._frozen(number)
                if frozen.state != TrialState.RUNNING:  # its worker has just told its end
                    continue
                self._study.sampler = self._plan.sampler_for(number)
                trial = _again(self._study, frozen)
                words = frozen.user_attrs.get(OVERRIDES)
                # None: its worker was killed while it drew.
                words = self._drawn(trial) if words is None else check_overrides(words)
                return Taken(trial, frozen, words, True, refused.pop_all())
        return None

    def _new(self) -> Taken | None:
        number = self.count(tuple(TrialState))
        claim = self._claimed(number)  # before anybody can find it left behind
        if claim is None:
            return None
        with contextlib.ExitStack() as refused:
            refused.push(claim)
            self._study.sampler = self._plan.sampler_for(number)
            trial = self._study.ask()
            if trial.number != number:  # this process was suspended, and another one has asked
                return None
            words = self._drawn(trial)
            return Taken(trial, self._frozen(number), words, False, refused.pop_all())

    def _drawn(self, trial: optuna.Trial) -> list[str]:
        words = space.suggest(self._dimensions, trial)
        trial.set_user_attr(OVERRIDES, words)
        return words

    def _claimed(self, number: int) -> contextlib.ExitStack | None:
        """Claims a trial until the stack is closed; returns None if another worker has it."""
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(claims.claim(self._worker(number)))
        except HeldError:
            return None
        return stack

    def _worker(self, number: int) -> str:
        """Returns the folder that the worker of a trial claims."""
        return files.join(self.folder(number), "worker")


def _again(study: optuna.Study, frozen: FrozenTrial) -> optuna.Trial:
    """Returns a trial that another process asked for, to report to.

    Optuna has no public name for a trial's id in its storage; tried with 5.0.
    """
    private: Any = frozen
    return optuna.Trial(study, private._trial_id)
