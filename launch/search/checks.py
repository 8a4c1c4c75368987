"""Checks of a search before anything runs: its metric, and the values of its space."""

import copy
import dataclasses
import random
from collections.abc import Iterator, Sequence

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.run import conditions
from tftpu.launch.search.space import Dimension, to_overrides
from tftpu.launch.settings import config_flags, own_code

_BEST = "train.best_metric"
_DRAWS = 200  # with which a value may be allowed


def choose_metric(given: str | None, changes: Sequence[str], experiment: Experiment) -> str:
    """Returns the metric of a search: that of `--metric`, or else that of the config.

    Args:
        given: by `--metric`.
        changes: overrides of the config, "--config.train.steps=500".
        experiment: the config, with these.

    Raises:
        UserError: an override names another metric, or no evaluation of the config has it.
    """
    own = experiment.best_metric or "loss"
    named = [change for change in changes if change.startswith(f"--config.{_BEST}=")]
    if given and named and given != own:
        raise UserError(f"{named[-1]} and --metric={given} differ: leave out one of them.")
    metric = given or own
    conditions.check_metric("--metric", metric, experiment)
    return metric


def check_space(space: Sequence[Dimension], changes: Sequence[str], experiment: Experiment) -> None:
    """Raises `UserError` for a field that has its value elsewhere, or a value of no use.

    Args:
        space: of the search.
        changes: overrides of the config in all trials.
        experiment: the config, with these.
    """
    for dimension in space:
        if dimension.field == _BEST:
            raise UserError(f"--space: {_BEST} is the same in all trials: --metric sets it.")
        given = [one for one in changes if one.startswith(f"--config.{dimension.field}=")]
        if given:
            raise UserError(f"{given[0]} sets a field of the space: leave out one of them.")
    for dimension in space:
        for value in _list_ends(dimension):
            _check_value(space, dimension.field, value, experiment)


def _check_value(
    space: Sequence[Dimension], field: str, value: str, experiment: Experiment
) -> None:
    """Raises `UserError` for a value that `tftpu train` would refuse, whatever else is drawn."""
    refusal: UserError | None = None
    for values in _iterate_draws(space, field, value):
        changed = copy.deepcopy(dataclasses.replace(experiment, callbacks=()))
        try:
            for change in to_overrides(values):
                config_flags.apply_override(changed, change)
            own_code.validate(changed)
            return
        except UserError as error:
            refusal = refusal or error
    raise UserError(f"--space: {field}={value} is not a value to train with: {refusal}")


def _iterate_draws(space: Sequence[Dimension], field: str, value: str) -> Iterator[dict[str, str]]:
    """Yields values by field, with one that is given: first beside those of the config."""
    chance, fixed = random.Random(0), _find_conditions(space, field) | {field: value}
    for draw in range(_DRAWS if len(space) > 1 else 1):
        values: dict[str, str] = {}
        for dimension in space:
            needed = dimension.only_if
            if needed is not None and values.get(needed[0]) != needed[1]:
                continue
            if dimension.field in fixed:
                values[dimension.field] = fixed[dimension.field]
            elif draw or needed is not None:
                values[dimension.field] = chance.choice(_list_ends(dimension))
        yield values


def _find_conditions(space: Sequence[Dimension], field: str) -> dict[str, str]:
    """Returns the values of other fields with which a field is drawn."""
    known = {dimension.field: dimension for dimension in space}
    found: dict[str, str] = {}
    while (condition := known[field].only_if) is not None:
        field = condition[0]
        found[field] = condition[1]
    return found


def _list_ends(dimension: Dimension) -> Sequence[str]:
    """Returns the texts of the choices, or of the two bounds."""
    return dimension.choices or (repr(dimension.low), repr(dimension.high))
