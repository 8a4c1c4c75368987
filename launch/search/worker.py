"""The workers of a search on this machine, which run trials until all have ended."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from tftpu.amounts import format_price
from tftpu.errors import ExitCode, UserError
from tftpu.launch.run import result
from tftpu.launch.search import pricing
from tftpu.launch.search.child import DIVERGED, HELD, PRUNE, TrialProcess
from tftpu.launch.search.logs import Logs
from tftpu.launch.search.plan import Plan
from tftpu.launch.search.trials import BEHIND, USD, WHY, ClaimedTrial, Trials
from tftpu.storage import files, lines
from tftpu.storage.owner import LockedError

_POLL_S = 1.0
_FAILURES = 3  # number of failed trials that end a search without a complete one
_ELSEWHERE = "another worker has taken it over"


class Workers:
    """Runs the trials of a search on this machine, several at a time.

    Args:
        plan: the plan of the search.
        study: the Optuna study.
        trials: the trials of the study.
        logs: the logs for the trials' output.
        say: a function that prints a line.
    """

    def __init__(
        self, plan: Plan, study: Any, trials: Trials, logs: Logs, say: Callable[[str], None]
    ):
        self._plan, self._study, self._trials = plan, study, trials
        self._logs, self._say = logs, say
        # Needed because claims do not exclude threads of the same process.
        self._lock = threading.Lock()
        # The processes of trials, by number; None while a process starts.
        self._running: dict[int, TrialProcess | None] = {}
        self._stopped = threading.Event()
        self._errors: list[BaseException] = []
        self._failures = 0

    def stop(self) -> None:
        """Asks the running trials to save and to end. A continued search resumes them."""
        self._stopped.set()
        for child in list(self._running.values()):
            if child is not None:
                child.ask_to_stop()

    def run(self, parallel: int) -> None:
        """Runs trials until all have ended, including those of other machines.

        Args:
            parallel: the number of trials that run at a time.

        Raises:
            UserError: several trials failed before any was complete, or a price cannot be
                predicted.
        """
        threads = [threading.Thread(target=self._run_worker) for _ in range(parallel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                # Waits in short steps, because a wait without end would hold signals back.
                thread.join(0.5)
        if self._errors:
            raise self._errors[0]

    def _run_worker(self) -> None:
        try:
            self._run_trials()
        except BaseException as error:
            self._errors.append(error)
            self.stop()

    def _run_trials(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                taken = self._trials.claim_next_trial(set(self._running))
                if taken is not None:
                    self._running[taken.trial.number] = None
            if taken is not None:
                try:
                    with taken.claim:
                        self._run_trial(taken)
                finally:
                    with self._lock:
                        del self._running[taken.trial.number]
            elif self._trials.over:
                return
            else:
                self._stopped.wait(_POLL_S)

    def _run_trial(self, taken: ClaimedTrial) -> None:
        number = taken.trial.number
        again = "again" if taken.resumed else "begins"
        self._print_status(number, f"{again}  {format_overrides(taken.words)}")
        twin = self._trials.find_duplicate(taken)
        if twin is not None:  # a run of the same config would end with the same value
            self._copy_result(taken, twin)
            return
        log = self._logs.begin(number)
        words = self._plan.build_arguments(taken.words, self._trials.resolve_workdir(number))
        try:
            if self._price_trial(taken, words, log):
                self._train(taken, words, log)
        finally:
            failure = self._logs.keep(number)
            if failure:
                self._print_status(number, failure)

    def _train(self, taken: ClaimedTrial, words: list[str], log: str) -> None:
        """Runs a trial and reports how it ended, unless it is to be resumed."""
        number = taken.trial.number
        run = self._trials.resolve_workdir(number)
        try:
            child = TrialProcess(words, run, self._plan.metric, log)
        except (EOFError, OSError):
            # A signal that will stop this search may first have ended the server that forks trials.
            if self._stopped.wait(_POLL_S):
                return
            raise
        try:
            self._running[number] = child
            if self._stopped.is_set():
                child.ask_to_stop()
            outcome, evaluated = self._follow(taken, run, child)
            code = child.wait()
        except UpdateFinishedTrialError:  # another worker has ended the trial
            self._print_status(number, _ELSEWHERE)
            return
        finally:  # also after an error: a process that gets no answer would wait forever
            child.close()
        if code == ExitCode.PREEMPTED or (code and self._stopped.is_set()):
            return  # a worker that continues the search resumes the trial
        if self._trials.is_lost(number):
            self._print_status(number, _ELSEWHERE)
        elif outcome == HELD:
            self._print_status(number, "another process still saves its run: trying again later")
        elif outcome == DIVERGED:
            self._report_end(taken, TrialState.PRUNED, "diverged")
        elif code:
            self._fail(taken, f"{_describe_exit(code)}: {_read_last_line(log)}")
        elif not evaluated:
            self._fail(taken, f"no evaluation reported {self._plan.metric}")
        else:
            self._report_result(taken, run, outcome == PRUNE)

    def _report_result(self, taken: ClaimedTrial, run: str, pruned: bool) -> None:
        found = result.read(run)
        best = found.get("best") if found else None
        if pruned:
            steps = found["steps"] if found else None
            self._report_end(taken, TrialState.PRUNED, f"pruned after {steps} steps")
        elif not best:
            self._report_end(taken, TrialState.PRUNED, f"{self._plan.metric} was never finite")
        else:
            self._succeed(taken, best["value"])

    def _price_trial(self, taken: ClaimedTrial, words: list[str], log: str) -> bool:
        """Reserves the price of a trial; returns False if it must not run, or the search stops."""
        plan, number = self._plan, taken.trial.number
        if not plan.slice or USD in taken.frozen.user_attrs:
            return True
        try:
            price = pricing.price(words, plan.slice, log, self._stopped)
        except pricing.CannotRunError as error:
            raise UserError(
                f"Trial {number} has no price: {error}: {_read_last_line(log)}. See "
                f"{self._logs.resolve_destination(number)}. The same command tries it again."
            ) from error
        except UserError as error:
            self._fail(taken, f"{error}: {_read_last_line(log)}")
            return False
        if price is None:
            return False
        if price.refusal:
            self._report_end(taken, TrialState.PRUNED, price.refusal)
            return False
        while not self._stopped.is_set():
            with contextlib.suppress(LockedError), self._lock:
                affords = self._trials.reserve_budget(taken.trial, price.usd)
                cost = f"{format_price(price.usd)} on {plan.slice}"
                self._print_status(
                    number, cost if affords else f"{cost}: above the budget, the search ends"
                )
                return affords
            self._stopped.wait(_POLL_S)
        return False

    def _follow(self, taken: ClaimedTrial, run: str, child: TrialProcess) -> tuple[str, bool]:
        """Reports the evaluations of a trial to the study until the trial ends.

        Returns:
            PRUNE, DIVERGED, HELD or "", and whether the trial was evaluated.
        """
        trial, pruned = taken.trial, taken.frozen.user_attrs.get(BEHIND, False)
        known = set(taken.frozen.intermediate_values)

        def report(number: int, value: float) -> None:
            # A resumed trial may repeat an evaluation.
            if number not in known and math.isfinite(value):
                trial.report(value, number)
                known.add(number)

        # Reports evaluations that a worker did not report before it was killed.
        evaluations = _read_evaluations(run, self._plan.metric)
        for number, value in enumerate(evaluations, 1):
            report(number, value)
        evaluated = bool(evaluations)
        while True:
            try:
                message = child.connection.recv()
            except (EOFError, OSError):
                return PRUNE if pruned else "", evaluated
            if message in (DIVERGED, HELD):
                return message, evaluated
            number, value, last = message
            if value is not None:
                report(number, value)
                evaluated = True
            # The first message of a resumed run may ask again about an evaluation that was already
            # reported.
            open_ = not pruned and not last and (value is not None or number in known)
            if open_ and trial.should_prune():  # the last evaluation ends the trial anyway
                pruned = True
                trial.set_user_attr(BEHIND, True)
            with contextlib.suppress(OSError):  # the trial's process may have been killed meanwhile
                child.connection.send(PRUNE if pruned else "")

    def _copy_result(self, taken: ClaimedTrial, twin: FrozenTrial) -> None:
        why = f"the same as trial {twin.number}"
        if twin.state == TrialState.COMPLETE:
            self._succeed(taken, twin.values[0], why)
        else:
            self._report_end(taken, twin.state, why)

    def _succeed(self, taken: ClaimedTrial, value: float, why: str = "") -> None:
        if self._tell_study(taken, why, values=value):
            text = f"{self._plan.metric} {value:.4g}"
            self._print_status(taken.trial.number, f"{text}, {why}" if why else text)

    def _fail(self, taken: ClaimedTrial, why: str) -> None:
        why = f"{why.rstrip('.')}. See {self._logs.resolve_destination(taken.trial.number)}."
        self._report_end(taken, TrialState.FAIL, f"failed: {why}")
        self._failures += 1
        if self._failures >= _FAILURES and not self._trials.count((TrialState.COMPLETE,)):
            raise UserError(
                f"{self._failures} trials failed and none is complete, the last one with {why}"
            )

    def _report_end(self, taken: ClaimedTrial, state: TrialState, why: str) -> None:
        if self._tell_study(taken, why, state=state):
            self._print_status(taken.trial.number, why)

    def _tell_study(self, taken: ClaimedTrial, why: str, **end: Any) -> bool:
        """Records a trial's end; prints a line and returns False if another worker has done so."""
        try:
            if why:
                taken.trial.set_user_attr(WHY, why)
            self._study.tell(taken.trial, **end)
            return True
        except (UpdateFinishedTrialError, ValueError):
            if not self._trials.is_finished(taken.trial.number):
                raise
            self._print_status(taken.trial.number, _ELSEWHERE)
            return False

    def _print_status(self, number: int, text: str) -> None:
        self._say(f"trial {number:<4}{text}")


def format_overrides(words: list[str]) -> str:
    """Returns the overrides of a trial as one line, without the prefix `--config.`."""
    return "  ".join(word.removeprefix("--config.") for word in words)


def _read_evaluations(run: str, metric: str) -> list[float]:
    """Returns the values of a metric that a run has written; NaN for an evaluation without it."""
    found = lines.read(files.join(run, "metrics.jsonl"))
    return [numbers.get(metric, math.nan) for _, split, numbers in found if split == "eval"]


def _describe_exit(code: int) -> str:
    """Returns a text about an exit code, such as "ended by SIGKILL" for 137 (out of memory)."""
    names = {128 + number: number.name for number in signal.Signals}
    return f"ended by {names[code]}" if code in names else f"exit code {code}"


def _read_last_line(log: str) -> str:
    with open(log, errors="replace") as file:
        said = [line.strip() for line in file if line.strip()]
    return said[-1] if said else "it printed nothing"
