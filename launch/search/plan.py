"""The plan of a search, which is `search.json` in its workdir, and the study that executes it."""

import contextlib
import dataclasses
import json
import os
import time
import warnings
from typing import Any, Literal

import numpy as np
import optuna
from optuna import pruners, samplers
from optuna.storages import JournalStorage
from optuna.trial import TrialState

from tftpu.config import Experiment, check_types, operational_fields, renamed, to_plain
from tftpu.config.keras_names import smaller_is_better
from tftpu.config.validation import at_least
from tftpu.errors import UserError, counted, did_you_mean
from tftpu.launch.search.journal import Journal
from tftpu.launch.settings import keras_objects
from tftpu.storage import files, locks
from tftpu.storage.owner import LockedError

FILE = "search.json"
# The names are those of Optuna's documentation.
SAMPLERS = ("tpe", "random", "qmc")
PRUNERS = ("median", "hyperband", "none")
# Fields of a plan that have flags.
GIVEN = ("space", "trials", "metric", "sampler", "pruner", "seed", "slice", "budget_usd")
_LATER = ("trials", "budget_usd")  # fields that may change when a search is continued
_PATIENCE = 30.0  # seconds to wait for a process that creates or pays for a trial
_SHOWN = 5  # largest number of differing fields that are shown


class ReplacedError(UserError):
    """Another search has replaced this one in its workdir."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a search.

    Attributes:
        config: name of a config of tftpu, or path of a user's config file.
        overrides: changes of the config in all trials, such as "--config.train.steps=500".
        space: the search space, as texts of the form in `launch.search.space`.
        metric: the evaluation metric that decides which trial is best.
        fields: the values of the config's fields, by path, after these overrides; recorded because
            the config's file may change.
        trials: the number of trials.
        sampler, pruner: names of an Optuna sampler and pruner, of `SAMPLERS` and `PRUNERS`.
        seed: the seed of the sampler.
        slice: the TPU slice for which preflight predicts each trial's price; "": none.
        budget_usd: the dollars that the trials may cost on the slice; None: no limit.
    """

    config: str
    overrides: tuple[str, ...]
    space: tuple[str, ...]
    metric: str
    fields: dict[str, Any]
    trials: int = 20
    sampler: str = "tpe"
    pruner: str = "median"
    seed: int = 0
    slice: str = ""
    budget_usd: float | None = None

    def __post_init__(self) -> None:
        for name, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
            value = getattr(self, name)
            if value not in known:
                raise UserError(
                    f"--{name}={value}: choose {', '.join(known)}.{did_you_mean(value, known)}"
                )

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Optuna's "minimize" or "maximize"."""
        return "minimize" if smaller_is_better(self.metric) else "maximize"

    @property
    def changes(self) -> list[str]:
        """The overrides of all trials, with the metric that decides their best checkpoints."""
        best = f"--config.train.best_metric={self.metric}"
        return [*self.overrides, *([] if best in self.overrides else [best])]

    def build_arguments(self, drawn: list[str], run: str) -> list[str]:
        """Returns the arguments of `tftpu train` for a trial.

        Args:
            drawn: the overrides that the trial draws.
            run: the trial's workdir.
        """
        return [f"--config={self.config}", *self.changes, *drawn, f"--workdir={run}"]

    def build_sampler(self, number: int) -> samplers.BaseSampler:
        """Returns the sampler that draws a trial.

        Each trial has its own seed (except in the sequence of "qmc"), so that several machines, or
        a continued search, do not draw the same values again.
        """
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if self.sampler == "tpe":
                return samplers.TPESampler(
                    seed=seed, multivariate=True, group=True, constant_liar=True
                )
            if self.sampler == "random":
                return samplers.RandomSampler(seed=seed)
            # All trials take points of one sequence, and the study keeps the position in it. Fields
            # that have a condition are drawn independently.
            return samplers.QMCSampler(
                scramble=True,
                seed=self.seed,
                independent_sampler=samplers.RandomSampler(seed=seed),
                warn_independent_sampling=False,
            )

    def open_study(self, workdir: str) -> optuna.Study:
        """Returns the study in a workdir, which is created if there is none."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            storage=JournalStorage(Journal(files.join(workdir, "study"))),
            study_name="search",
            direction=self.direction,
            pruner=self._build_pruner(),
            load_if_exists=True,
        )

    def _build_pruner(self) -> pruners.BasePruner:
        if self.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=4)
        return pruners.HyperbandPruner() if self.pruner == "hyperband" else pruners.NopPruner()


def extract_fields(experiment: Experiment) -> dict[str, Any]:
    """Returns the fields of a config that affect the results of its runs, as JSON, by path."""
    flat = _flatten(to_plain(keras_objects.describe_callbacks(experiment)))
    left_out = tuple(f"{name}." for name in operational_fields(experiment))
    return {name: value for name, value in flat.items() if not f"{name}.".startswith(left_out)}


def describe_differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns a text about the fields in which two configs differ; "" if none differs."""
    found = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in before | now
        if repr(before.get(name)) != repr(now.get(name))  # as texts, nan equals nan
    ]
    return ", ".join(found[:_SHOWN]) + (", …" if found[_SHOWN:] else "")


def read_recorded(workdir: str) -> Plan | None:
    """Returns the plan of a workdir; None if there is none.

    Raises:
        UserError: the plan cannot be read.
    """
    path = files.join(workdir, FILE)
    if not files.exists(path):
        return None
    try:
        found: dict[str, Any] = json.loads(files.read(path))
        # Raises for half of a surrogate pair, which cannot be printed.
        json.dumps(found, ensure_ascii=False).encode()
        for name in ("overrides", "space"):
            if not isinstance(found[name], list):
                raise TypeError(f"{name} is {found[name]!r}, not a list")
            found[name] = tuple(found[name])
        plan = Plan(**found)
        check_types("search", plan)
        plan = dataclasses.replace(plan, fields=renamed.update_classes(plan.fields))
        check_overrides(plan.overrides)
        at_least("search.trials", plan.trials, 1)
        return plan
    except (ValueError, TypeError, KeyError, UserError) as error:
        reason = str(error).rstrip(".")
        raise UserError(f"{path} is not a search's plan: {reason}.") from error


def check_overrides(words: Any) -> list[str]:
    """Returns texts of a search's record as a list, after a check that they are overrides.

    Raises:
        UserError: a text is not an override; `--config=FILE.py`, for example, would run a program.
    """
    for word in words if isinstance(words, list | tuple) else [words]:
        if not (isinstance(word, str) and word.startswith("--config.")):
            raise UserError(
                f"The search's record contains {word!r}, which is not an override (--config.…)."
            )
    return list(words)


def record(plan: Plan, workdir: str) -> str:
    """Writes the plan of a workdir; only the number of trials and the budget may change later.

    Replaces a different search whose trials all failed, or that has none. A process that runs that
    search ends before its next trial (`check_recorded`).

    Returns:
        A text about the replaced search; "" if there was none.

    Raises:
        UserError: the workdir has another search, or cannot be written.
    """
    try:
        if plan == read_recorded(workdir):
            return ""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                with lock_study(workdir):
                    return _replace(plan, workdir)
            except LockedError:  # another process creates or pays for a trial, which is short
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
    except OSError as error:
        raise UserError(
            f"The folder '{workdir}' cannot be written ({error.strerror or error}): choose another."
        ) from error


def check_recorded(plan: Plan, workdir: str) -> None:
    """Raises `ReplacedError` if another plan was recorded in the workdir."""
    found = read_recorded(workdir)
    changed = _describe_change(found, plan) if found is not None else ""
    if changed:
        raise ReplacedError(
            f"The search in {workdir!r} was replaced by another while it ran ({changed}). Nothing "
            "of it had succeeded: run it with another --workdir=DIR."
        )


def lock_study(workdir: str) -> contextlib.AbstractContextManager[None]:
    """Excludes other processes while a plan is recorded, or a trial is created or paid for.

    Raises:
        LockedError: another process does so.
    """
    return locks.locked(resolve_lock(workdir))


def resolve_lock(workdir: str) -> str:
    """Returns the folder that `lock_study` locks."""
    return files.join(workdir, "asking")


def _replace(plan: Plan, workdir: str) -> str:
    """Writes a plan while the study is locked; returns a text about a search that it replaces."""
    before, replaced = read_recorded(workdir), ""
    changed = _describe_change(before, plan) if before is not None else ""
    if before is not None and changed:
        replaced = _remove_failed(before, workdir)
        if not replaced:
            raise UserError(
                f"The workdir {workdir!r} holds a search that differs in {changed}. Give this "
                "search another workdir with --workdir=DIR."
            )
    text = json.dumps(dataclasses.asdict(plan), indent=2) + "\n"
    files.write_whole(files.join(workdir, FILE), text.encode())
    return replaced


def _describe_change(before: Plan, plan: Plan) -> str:
    """Returns a difference from a search's plan that prevents continuing it; "" if none does."""
    # Overrides are not compared: if they change the run, they change `fields`.
    left_out = ("overrides", *_LATER)
    names = [field.name for field in dataclasses.fields(Plan) if field.name not in left_out]
    # Only the first difference is returned, so the metric comes first and the config's fields last.
    for name in sorted(names, key=lambda name: (name != "metric", name == "fields")):
        was, now = getattr(before, name), getattr(plan, name)
        if name == "fields":
            differing = describe_differences(was, now)
            if differing:
                return f"config: {differing}"
        elif name == "config" and os.path.basename(was) == os.path.basename(now):
            continue  # the path of the config does not matter, because its fields are compared
        elif was != now:
            return f"{name}: {was!r}, not {now!r}"
    return ""


def _remove_failed(before: Plan, workdir: str) -> str:
    """Removes a search if all its trials failed; returns a text about it, or "" if one did not."""
    trials = before.open_study(workdir).get_trials(deepcopy=False)
    if any(trial.state != TrialState.FAIL for trial in trials):
        return ""
    for folder in ("study", "trials", "logs"):
        files.remove_tree(files.join(workdir, folder))
    if not trials:
        return "an earlier search, which had begun no trial"
    return f"{counted(len(trials), 'trial')} of an earlier search, none of which succeeded"


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Returns the leaves of dicts and lists by paths like "model.width"; flat lists are leaves."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        parts = enumerate(value)
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for name, part in parts:
        inside = f"{path}.{name}" if path else str(name)
        if not inside.endswith("description.config.name"):  # Keras numbers these, so they vary
            found |= _flatten(part, inside)
    return found
