"""The trials of a study: their attributes, and the claims that assign each to one worker."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from tftpu.launch.search import space
from tftpu.launch.search.plan import (
    Plan,
    check_overrides,
    check_recorded,
    lock_study,
    resolve_lock,
)
from tftpu.launch.search.watch import LeaseWatch
from tftpu.storage import files, locks
from tftpu.storage.owner import LockedError, LockLostError, build_locked_error

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
# Names of the attributes of a trial and of a study.
OVERRIDES = "overrides"  # the values that the trial draws, as command-line arguments
BEHIND = "behind"  # whether the pruner has stopped the trial
WHY = "why"  # why the trial was pruned or failed, or whose result it has copied
USD = "usd"  # preflight's price of the trial on the plan's slice
STOPPED_AT = "stopped_at_usd"  # the budget that the next trial would have exceeded


@dataclasses.dataclass
class ClaimedTrial:
    """A trial that this process has claimed.

    Attributes:
        trial: the Optuna trial.
        frozen: a copy of the trial's record when it was claimed.
        words: the overrides that the trial draws.
        resumed: whether an earlier worker had begun the trial.
        claim: the claim, which is released when it is closed.
    """

    trial: optuna.Trial
    frozen: FrozenTrial
    words: list[str]
    resumed: bool
    claim: contextlib.ExitStack


class Trials:
    """The trials of a search, for one machine.

    Args:
        plan: the plan of the search.
        workdir: the workdir of the search, local or `gs://`.
        study: the Optuna study.
        dimensions: the dimensions of the space.
    """

    def __init__(
        self, plan: Plan, workdir: str, study: optuna.Study, dimensions: Sequence[space.Dimension]
    ):
        self._plan, self._workdir, self._study = plan, workdir, study
        self._dimensions = dimensions
        self._watch = LeaseWatch()

    @property
    def over(self) -> bool:
        """True once all trials, or all trials within the budget, have ended."""
        if self.count(FINISHED) >= self._plan.trials:
            return True
        return self._is_over_budget() and not any(map(self._can_run, self._list_running()))

    def count(self, states: Sequence[TrialState]) -> int:
        """Returns the number of trials in some states."""
        return len(self._study.get_trials(deepcopy=False, states=tuple(states)))

    def resolve_folder(self, number: int) -> str:
        """Returns the folder of a trial."""
        return files.join(self._workdir, "trials", f"{number:04d}")

    def resolve_workdir(self, number: int) -> str:
        """Returns the workdir of a trial's run."""
        return files.join(self.resolve_folder(number), "run")

    def claim_next_trial(self, own: set[int]) -> ClaimedTrial | None:
        """Claims an abandoned trial or a new one; returns None if there is none at present.

        Does not wait for other machines, because the other threads of this process wait for it.

        Args:
            own: the numbers of the trials that this process runs; its claims do not exclude other
                threads of this process.

        Raises:
            ReplacedError: another search has replaced this one in the workdir.
        """
        taken = self._claim_left_behind(own)
        if taken is not None or self._is_over_budget() or not self._is_trial_wanted():
            return taken
        try:
            with self._locked_study():
                return self._claim_new() if self._is_trial_wanted() else None
        except LockedError:  # another machine is creating or paying for a trial
            return None

    def is_lost(self, number: int) -> bool:
        """Returns whether another worker may have taken a trial that this process claimed."""
        try:
            locks.check_lock(self._resolve_worker_folder(number))
        except (LockLostError, OSError):  # this process was suspended, or cannot reach the bucket
            return True
        return False

    def is_finished(self, number: int) -> bool:
        """Returns whether a trial has ended."""
        return self._read_frozen(number).state in FINISHED

    def find_duplicate(self, taken: ClaimedTrial) -> FrozenTrial | None:
        """Returns a complete or pruned trial with the same overrides; None if there is none."""
        over = (TrialState.COMPLETE, TrialState.PRUNED)
        for trial in self._study.get_trials(deepcopy=False, states=over):
            if trial.user_attrs.get(OVERRIDES) == taken.words:
                return trial
        return None

    def reserve_budget(self, trial: optuna.Trial, usd: float) -> bool:
        """Reserves a trial's cost; returns False and ends the search if the budget is too small.

        Raises:
            LockedError: another machine is creating or paying for a trial.
        """
        with self._locked_study():
            others = [t for t in self._study.get_trials(deepcopy=False) if t.number != trial.number]
            spent = sum(t.user_attrs.get(USD, 0.0) for t in others)
            budget = self._plan.budget_usd
            if budget is not None and spent + usd > budget:
                self._study.set_user_attr(STOPPED_AT, budget)
                return False
            trial.set_user_attr(USD, usd)
            return True

    @contextlib.contextmanager
    def _locked_study(self) -> Iterator[None]:
        """Locks the study without waiting, or raises LockedError."""
        place = resolve_lock(self._workdir)
        if not self._watch.is_free(place):
            raise build_locked_error(place, None)
        with lock_study(self._workdir):
            check_recorded(self._plan, self._workdir)
            yield

    def _is_trial_wanted(self) -> bool:
        return self.count(tuple(TrialState)) < self._plan.trials

    def _is_over_budget(self) -> bool:
        stopped, budget = self._study.user_attrs.get(STOPPED_AT), self._plan.budget_usd
        return stopped is not None and budget is not None and budget <= stopped

    def _list_running(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _read_frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _can_run(self, frozen: FrozenTrial) -> bool:
        """Returns whether a begun trial may run: its cost is reserved, or budget is left."""
        return USD in frozen.user_attrs or not self._is_over_budget()

    def _claim_left_behind(self, own: set[int]) -> ClaimedTrial | None:
        for frozen in self._list_running():
            number = frozen.number
            if number in own or not self._can_run(frozen):
                continue
            claim = (
                self._try_claim(number)
                if self._watch.is_free(self._resolve_worker_folder(number))
                else None
            )
            if claim is None:
                continue
            with contextlib.ExitStack() as refused:
                refused.push(claim)
                check_recorded(self._plan, self._workdir)
                frozen = self._read_frozen(number)
                # The trial's worker may have reported its end meanwhile.
                if frozen.state != TrialState.RUNNING:
                    continue
                self._study.sampler = self._plan.build_sampler(number)
                trial = _reopen_trial(self._study, frozen)
                words = frozen.user_attrs.get(OVERRIDES)
                # The trial's worker may have been killed before it recorded the overrides.
                words = self._draw_overrides(trial) if words is None else check_overrides(words)
                return ClaimedTrial(trial, frozen, words, True, refused.pop_all())
        return None

    def _claim_new(self) -> ClaimedTrial | None:
        number = self.count(tuple(TrialState))
        # Claimed first, so that nobody takes the new trial for an abandoned one.
        claim = self._try_claim(number)
        if claim is None:
            return None
        with contextlib.ExitStack() as refused:
            refused.push(claim)
            self._study.sampler = self._plan.build_sampler(number)
            trial = self._study.ask()
            # They differ if this process was suspended, and another one has created the trial.
            if trial.number != number:
                return None
            words = self._draw_overrides(trial)
            return ClaimedTrial(trial, self._read_frozen(number), words, False, refused.pop_all())

    def _draw_overrides(self, trial: optuna.Trial) -> list[str]:
        words = space.suggest(self._dimensions, trial)
        trial.set_user_attr(OVERRIDES, words)
        return words

    def _try_claim(self, number: int) -> contextlib.ExitStack | None:
        """Claims a trial until the result is closed; returns None if another worker has it."""
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(locks.locked(self._resolve_worker_folder(number)))
        except LockedError:
            return None
        return stack

    def _resolve_worker_folder(self, number: int) -> str:
        """Returns the folder that a trial's worker claims."""
        return files.join(self.resolve_folder(number), "worker")


def _reopen_trial(study: optuna.Study, frozen: FrozenTrial) -> optuna.Trial:
    """Returns a trial that another process has created, to report its evaluations.

    Optuna has no public name for a trial's id in its storage. Tested with Optuna 5.0.
    """
    private: Any = frozen
    return optuna.Trial(study, private._trial_id)
