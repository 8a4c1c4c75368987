"""Checks a search before anything runs: its metric, and the values of its space."""

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
_DRAWS = 200  # number of settings of the other fields that are tried with a value


def choose_metric(given: str | None, changes: Sequence[str], experiment: Experiment) -> str:
    """Returns the metric of a search: the value of `--metric`, or the config's metric.

    Args:
        given: the value of `--metric`.
        changes: overrides of the config, such as "--config.train.steps=500".
        experiment: the config with these overrides.

    Raises:
        UserError: an override names another metric, or the config's evaluation does not have it.
    """
    own = experiment.best_metric or "loss"
    named = [change for change in changes if change.startswith(f"--config.{_BEST}=")]
    if given and named and given != own:
        raise UserError(
            f"{named[-1]} and --metric={given} name different metrics: leave out one of them."
        )
    metric = given or own
    conditions.check_metric("--metric", metric, experiment)
    return metric


def check_space(space: Sequence[Dimension], changes: Sequence[str], experiment: Experiment) -> None:
    """Raises `UserError` if an override sets a field of the space, or a bound or choice is invalid.

    Args:
        space: the space of the search.
        changes: overrides of the config in all trials.
        experiment: the config with these overrides.
    """
    config_flags.check_lengths([*changes, *(f"--config.{one.field}=..." for one in space)])
    for dimension in space:
        if dimension.field == _BEST:
            raise UserError(
                f"--space: {_BEST} must be the same in all trials: set it with --metric."
            )
        given = [one for one in changes if one.startswith(f"--config.{dimension.field}=")]
        if given:
            raise UserError(f"{given[0]} sets a field of the space: leave out one of them.")
    for dimension in space:
        for value in _list_ends(dimension):
            _check_value(space, dimension.field, value, experiment)


def _check_value(
    space: Sequence[Dimension], field: str, value: str, experiment: Experiment
) -> None:
    """Raises `UserError` if a value is invalid with every tried setting of the other fields."""
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
    raise UserError(f"--space: {field}={value} cannot be trained with: {refusal}")


def _iterate_draws(space: Sequence[Dimension], field: str, value: str) -> Iterator[dict[str, str]]:
    """Yields settings in which `field` is `value`; all but the first draw the other fields, too."""
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
    """Returns the values of other fields that the conditions of a field require."""
    known = {dimension.field: dimension for dimension in space}
    found: dict[str, str] = {}
    while (condition := known[field].only_if) is not None:
        field = condition[0]
        found[field] = condition[1]
    return found


def _list_ends(dimension: Dimension) -> Sequence[str]:
    """Returns the texts of the choices, or of the two bounds."""
    return dimension.choices or (repr(dimension.low), repr(dimension.high))
