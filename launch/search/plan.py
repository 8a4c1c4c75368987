"""The plan of a search, `search.json` in its workdir, and the study that carries it out."""

import dataclasses
import json
import warnings
from typing import Any, Literal

import numpy as np
import optuna
from optuna import pruners, samplers
from optuna.storages import JournalStorage

from tftpu.errors import UserError, did_you_mean
from tftpu.launch.search.journal import Journal
from tftpu.storage import files
from tftpu.training.better import smaller_is_better

FILE = "search.json"
# By the names that Optuna's documentation gives them.
SAMPLERS = ("tpe", "random", "qmc")
PRUNERS = ("median", "hyperband", "none")
_LATER = ("trials", "budget_usd")  # what a search that is continued may change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A search.

    Attributes:
        config: name of a config, or path of a user's own.
        overrides: changes of the config in all trials, "--config.train.steps=500".
        space: texts of `launch.search.space`.
        trials: number of them.
        metric: of the evaluation, which decides.
        sampler, pruner: names.
        seed: of the sampler.
        slice: TPU slice that preflight prices each trial for; "": none.
        budget_usd: that the trials may cost on the slice; None: any.
    """

    config: str
    overrides: tuple[str, ...]
    space: tuple[str, ...]
    trials: int
    metric: str
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

    def words(self, drawn: list[str], run: str) -> list[str]:
        """Returns the command line of a trial, after the name of the command.

        Args:
            drawn: overrides that the trial draws.
            run: its workdir.
        """
        return [f"--config={self.config}", *self.overrides, *drawn, f"--workdir={run}"]

    def sampler_for(self, number: int) -> samplers.BaseSampler:
        """Returns the sampler that draws a trial.

        Each has its own seed: of several machines, and of a search that is continued, none draws
        what another has drawn.
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
            # Its points are one sequence, whose position the study keeps. Fields of a condition
            # may be in none of them.
            return samplers.QMCSampler(
                scramble=True,
                seed=self.seed,
                independent_sampler=samplers.RandomSampler(seed=seed),
                warn_independent_sampling=False,
            )

    def study(self, workdir: str) -> optuna.Study:
        """Returns the study in a workdir, which is created if there is none."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            storage=JournalStorage(Journal(files.join(workdir, "study"))),
            study_name="search",
            direction=self.direction,
            pruner=self._pruner(),
            load_if_exists=True,
        )

    def _pruner(self) -> pruners.BasePruner:
        if self.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=4)
        return pruners.HyperbandPruner() if self.pruner == "hyperband" else pruners.NopPruner()


def recorded(workdir: str) -> Plan | None:
    """Returns the plan of a workdir; None if there is none.

    Raises:
        UserError: it cannot be read.
    """
    path = files.join(workdir, FILE)
    if not files.exists(path):
        return None
    try:
        fields: dict[str, Any] = json.loads(files.read(path))
        lists = {name: tuple(fields[name]) for name in ("overrides", "space")}
        return Plan(**{**fields, **lists})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a search's plan: {error}.") from error


def record(plan: Plan, workdir: str) -> None:
    """Writes the plan of a workdir; only the number of trials and the budget may change later.

    Raises:
        UserError: the workdir has another search, or cannot be written.
    """
    before = recorded(workdir)
    if before is not None:
        later = {name: getattr(plan, name) for name in _LATER}
        same = dataclasses.replace(before, **later)
        for field in dataclasses.fields(Plan):
            was, now = getattr(same, field.name), getattr(plan, field.name)
            if was != now:
                raise UserError(
                    f"The workdir {workdir!r} holds a search with another {field.name}: {was!r}, "
                    f"not {now!r}. Give this one its own workdir with --workdir=DIR."
                )
    if plan != before:
        text = json.dumps(dataclasses.asdict(plan), indent=2) + "\n"
        try:
            files.write_whole(files.join(workdir, FILE), text.encode())
        except OSError as error:
            raise UserError(
                f"The folder '{workdir}' cannot be written ({error.strerror or error}): choose "
                "another."
            ) from error
