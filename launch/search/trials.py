"""The trials of a study: their attributes, and the claims by which one worker runs each of them."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from tftpu.launch.search import space
from tftpu.launch.search.plan import Plan
from tftpu.storage import claims, files
from tftpu.storage.owner import HeldError

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

    @property
    def over(self) -> bool:
        """True once all trials have ended, or the next one would exceed the budget."""
        return self.count(FINISHED) >= self._plan.trials or self._over_budget()

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

        Args:
            own: numbers of the trials that this process runs, whose claims do not exclude it.
        """
        try:
            with claims.claim(files.join(self._workdir, "asking")):
                if self._over_budget():
                    return None
                return self._left_behind(own) or self._new()
        except HeldError:  # another machine asks at this moment
            return None

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
        with claims.claim(files.join(self._workdir, "asking")):
            others = [t for t in self._study.get_trials(deepcopy=False) if t.number != trial.number]
            spent = sum(t.user_attrs.get(USD, 0.0) for t in others)
            budget = self._plan.budget_usd
            if budget is not None and spent + usd > budget:
                self._study.set_user_attr(STOPPED_AT, budget)
                return False
            trial.set_user_attr(USD, usd)
            return True

    def _over_budget(self) -> bool:
        stopped, budget = self._study.user_attrs.get(STOPPED_AT), self._plan.budget_usd
        return stopped is not None and budget is not None and budget <= stopped

    def _left_behind(self, own: set[int]) -> Taken | None:
        for frozen in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            claim = None if frozen.number in own else self._claimed(frozen.number)
            if claim is not None:
                self._study.sampler = self._plan.sampler_for(frozen.number)
                trial = _again(self._study, frozen)
                words = frozen.user_attrs.get(OVERRIDES)
                if words is None:  # its worker was killed while it drew
                    words = self._drawn(trial)
                return Taken(trial, frozen, words, True, claim)
        return None

    def _new(self) -> Taken | None:
        number = self.count(tuple(TrialState))
        if number >= self._plan.trials:
            return None
        self._study.sampler = self._plan.sampler_for(number)
        trial = self._study.ask()
        claim = self._claimed(trial.number)
        assert claim is not None  # nobody else knows its number yet
        words = self._drawn(trial)
        return Taken(trial, self._study.trials[trial.number], words, False, claim)

    def _drawn(self, trial: optuna.Trial) -> list[str]:
        words = space.suggest(self._dimensions, trial)
        trial.set_user_attr(OVERRIDES, words)
        return words

    def _claimed(self, number: int) -> contextlib.ExitStack | None:
        """Claims a trial until the stack is closed; returns None if another worker has it."""
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(claims.claim(files.join(self.folder(number), "worker")))
        except HeldError:
            return None
        return stack


def _again(study: optuna.Study, frozen: FrozenTrial) -> optuna.Trial:
    """Returns a trial that another process asked for, to report to.

    Optuna has no public name for a trial's id in its storage; tried with 5.0.
    """
    private: Any = frozen
    return optuna.Trial(study, private._trial_id)
