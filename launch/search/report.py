"""The result of a search, as text and as `result.json`."""

import shlex

import optuna
from optuna.trial import FrozenTrial, TrialState

from tftpu.amounts import format_price
from tftpu.errors import counted
from tftpu.launch.run import result
from tftpu.launch.search.plan import Plan
from tftpu.launch.search.trials import OVERRIDES, STOPPED_AT, USD, WHY
from tftpu.launch.search.worker import format_overrides
from tftpu.storage import files

FEWEST = 4  # number of complete trials that a picture needs
_ROWS = 5  # largest number of best trials, and of failed ones, that are shown
_NAMES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "not over",
}


def format_result(
    plan: Plan,
    study: optuna.Study,
    workdir: str,
    drawn: tuple[str, dict[str, float]] | None,
) -> str:
    """Returns the result of a search: how trials ended, the best, and the best config's command.

    Args:
        plan: the plan of the search.
        study: the Optuna study.
        workdir: the workdir of the search.
        drawn: the picture's path and the importance of the fields; None if too few trials are
            complete.
    """
    trials = study.get_trials(deepcopy=False)
    rows: list[tuple[str, str]] = []
    lines = ["", _format_counts(plan, study, trials, workdir)]
    lines += [f"  trial {t.number:<4} {t.user_attrs[WHY]}" for t in trials if _has_failed(t)][
        :_ROWS
    ]
    best = rank_complete(plan, trials)
    for trial in [t for t in best if not _is_repeated(t)][:_ROWS]:
        words = format_overrides(trial.user_attrs[OVERRIDES])
        lines.append(f"  trial {trial.number:<4} {plan.metric} {trial.value:.4g}  {words}")
    if drawn and drawn[1]:
        shares = "  ".join(f"{name} {share:.0%}" for name, share in drawn[1].items())
        rows.append(("importance", shares))
    if best:
        run = files.join(workdir, "trials", f"{best[0].number:04d}", "run")
        rows += [
            ("best config", format_command(plan, best[0])),
            ("its run", f"tftpu evaluate {shlex.quote(run)}"),
        ]
    rows.append(("picture", drawn[0] if drawn else f"once {FEWEST} trials are complete"))
    rows.append(("try next", f"tensorboard --logdir={shlex.quote(workdir)}"))
    return "\n".join([*lines, "", *(f"  {name:14}{value}" for name, value in rows)])


def write_result(plan: Plan, study: optuna.Study, workdir: str) -> None:
    """Writes `result.json` with the best trial, for other programs, if a trial is complete."""
    trials = study.get_trials(deepcopy=False)
    best = rank_complete(plan, trials)
    if not best:
        return
    record: result.SearchResult = {
        "trials": len(trials),
        "complete": len(best),
        "best": {
            "trial": best[0].number,
            "metric": plan.metric,
            "value": best[0].value,
            "overrides": best[0].user_attrs[OVERRIDES],
        },
    }
    result.write_search(record, workdir)


def rank_complete(plan: Plan, trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Returns the complete trials, the best one first.

    A trial that copied its result from another one, without a run, comes after that one.
    """
    done = sorted((t for t in trials if t.state == TrialState.COMPLETE), key=_is_repeated)
    return sorted(done, key=lambda t: t.value or 0.0, reverse=plan.direction == "maximize")


def format_command(plan: Plan, trial: FrozenTrial) -> str:
    """Returns the command that trains the config of a trial."""
    words = [f"--config={plan.config}", *plan.changes, *trial.user_attrs[OVERRIDES]]
    return " ".join(["tftpu train", *map(shlex.quote, words)])


def _format_counts(plan: Plan, study: optuna.Study, trials: list[FrozenTrial], workdir: str) -> str:
    numbers = {name: sum(t.state == state for t in trials) for state, name in _NAMES.items()}
    counts = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
    line = f"{counted(len(trials), 'trial')} of {plan.trials} in {workdir}: {counts or 'none yet'}"
    if plan.slice:
        usd = sum(t.user_attrs.get(USD, 0.0) for t in trials)
        line += f"; {format_price(usd)} on {plan.slice}, as preflight predicts"
        if plan.budget_usd is not None and study.user_attrs.get(STOPPED_AT) == plan.budget_usd:
            line += f", and the next trial exceeds the budget of {format_price(plan.budget_usd)}"
    return line


def _is_repeated(trial: FrozenTrial) -> bool:
    """Returns whether a complete trial took its result from a trial with the same values."""
    return WHY in trial.user_attrs


def _has_failed(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.FAIL and WHY in trial.user_attrs
