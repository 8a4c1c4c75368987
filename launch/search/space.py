"""The space of a search: fields of a config, and the values that they may take.

    optimizer.learning_rate=log:1e-4..1e-1       a number, on a logarithmic scale
    train.label_smoothing=uniform:0..0.2         a number
    model.width=uniform:16..128                  a whole number, if the field is one
    model.blocks=choice:(1,1),(2,2)              one of the values between commas outside brackets
    optimizer.momentum=uniform:0..0.99 if optimizer.name=sgd

Bounds and values have the types of their fields.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tftpu.config import Experiment, read_fields
from tftpu.errors import UserError, did_you_mean
from tftpu.launch.settings import config_flags, config_values

_KINDS = ("uniform", "log", "choice")
_FORM = "FIELD=uniform:LOW..HIGH, FIELD=log:LOW..HIGH or FIELD=choice:A,B"
_LARGEST = 2**53  # whole numbers pass through float64, which is exact up to here


class TrialProtocol(Protocol):
    """The methods of an Optuna trial that draw values."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """Returns a number."""
        ...

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        """Returns a whole number."""
        ...

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Returns one of several values."""
        ...


@dataclasses.dataclass(frozen=True)
class Dimension:
    """A field, and the values that it may take.

    Attributes:
        field: the path of the field, such as "optimizer.learning_rate".
        kind: "uniform", "log" or "choice".
        whole: whether the values are whole numbers.
        low, high: the bounds of a number, both included.
        choices: the texts of the values, as in `--config.FIELD=TEXT`.
        only_if: the condition: another field of the space and the text of its value; None: no
            condition.
    """

    field: str
    kind: str
    whole: bool = False
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()
    only_if: tuple[str, str] | None = None

    def suggest(self, trial: TrialProtocol) -> str:
        """Returns the text of a value that a trial draws."""
        if self.kind == "choice":
            return trial.suggest_categorical(self.field, self.choices)
        log = self.kind == "log"
        if self.whole:
            return str(trial.suggest_int(self.field, int(self.low), int(self.high), log=log))
        value = trial.suggest_float(self.field, self.low, self.high, log=log)
        # Rounds away digits that make no difference. A narrow range needs more digits.
        narrow = max(abs(self.low), abs(self.high)) / (self.high - self.low)
        rounded = float(f"{value:.{4 + int(math.log10(narrow))}g}")
        return f"{min(max(rounded, self.low), self.high):.15g}"


def parse(texts: Sequence[str], experiment: Experiment) -> list[Dimension]:
    """Returns the dimensions of a space, in the order of their texts.

    Args:
        texts: texts of the form in this module's docstring.
        experiment: the experiment whose fields they name.

    Raises:
        UserError: `texts` is empty, or a text has another form, names no field or one named before,
            has values of another type, or a condition that no earlier choice can meet.
    """
    found: dict[str, Dimension] = {}
    for text in texts:
        dimension = _parse_dimension(text, experiment)
        if dimension.field in found:
            raise UserError(f"--space: {dimension.field} is named twice.")
        _check_condition(text, dimension, found)
        found[dimension.field] = dimension
    if not found:
        raise UserError(f"There is nothing to search: give --space='{_FORM}'.")
    return list(found.values())


def suggest(space: Sequence[Dimension], trial: TrialProtocol) -> list[str]:
    """Returns the overrides that a trial draws, such as "--config.model.width=64"."""
    values: dict[str, str] = {}
    for dimension in space:
        if dimension.only_if is None or _is_met(dimension.only_if, values):
            values[dimension.field] = dimension.suggest(trial)
    return to_overrides(values)


def to_overrides(values: Mapping[str, str]) -> list[str]:
    """Returns the overrides of a config that set fields to values."""
    return [f"--config.{field}={value}" for field, value in values.items()]


def _is_met(condition: tuple[str, str], values: Mapping[str, str]) -> bool:
    return values.get(condition[0]) == condition[1]


def _parse_dimension(text: str, experiment: Experiment) -> Dimension:
    match = re.fullmatch(r"\s*([\w.]+)\s*=\s*(\w+):(.+?)(?:\s+if\s+([\w.]+)=(.+?))?\s*", text)
    if not match:
        raise UserError(f"--space={text}: write {_FORM}.")
    field, kind, values, other, value = match.groups()
    if kind not in _KINDS:
        raise UserError(f"--space={text}: there is no {kind!r}.{did_you_mean(kind, _KINDS)}")
    only_if = (other, value) if other else None
    field = field.removeprefix("config.")
    if kind == "choice":
        return Dimension(
            field, kind, choices=_parse_choices(text, field, values, experiment), only_if=only_if
        )
    low, high, whole = _parse_bounds(text, field, values, experiment)
    if not low < high:
        raise UserError(f"--space={text}: the lower bound {low:g} must be below {high:g}.")
    if kind == "log" and low <= 0:
        raise UserError(
            f"--space={text}: a logarithmic range needs bounds above 0, but {low:g} is not."
        )
    return Dimension(field, kind, whole, low, high, only_if=only_if)


def _parse_choices(text: str, field: str, values: str, experiment: Experiment) -> tuple[str, ...]:
    try:
        found = tuple(config_values.split(f"({values})"))
    except ValueError as error:
        raise UserError(f"--space={text}: {error}.") from error
    meant = [
        config_flags.parse_override(experiment, f"--config.{field}={value}") for value in found
    ]
    if len(found) < 2:
        raise UserError(f"--space={text}: give two values or more.")
    for one, other in itertools.combinations(range(len(found)), 2):
        if meant[one] == meant[other]:
            same = f"{found[one]} and {found[other]} are the same"
            raise UserError(f"--space={text}: the value {same} is named twice: leave one out.")
    return found


def _parse_bounds(
    text: str, field: str, values: str, experiment: Experiment
) -> tuple[float, float, bool]:
    parts = values.split("..")
    if len(parts) != 2:
        raise UserError(f"--space={text}: write two bounds, such as 1e-4..1e-1.")
    found = []
    for part in parts:
        value = config_flags.parse_override(experiment, f"--config.{field}={part}")
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise UserError(f"--space={text}: {part} is not a number, so it cannot be a bound.")
        found.append(value)
    if not all(type(value) in (int, float) for value in found):
        raise UserError(f"--space={text}: the values of {field} are not numbers: write choice:A,B.")
    low, high = found
    if any(isinstance(value, int) and abs(value) > _LARGEST for value in found):
        raise UserError(
            f"--space={text}: a bound is a whole number beyond 2^53: give smaller bounds."
        )
    if not math.isfinite(high - low):
        raise UserError(
            f"--space={text}: this range is wider than the largest number: give closer bounds."
        )
    if float in _list_types(experiment, field):
        return float(low), float(high), False
    return low, high, True


def _list_types(experiment: Experiment, field: str) -> tuple[Any, ...]:
    """Returns the types that a field may have."""
    *path, name = field.split(".")
    kind = read_fields(type(functools.reduce(getattr, path, experiment)))[name]
    return tuple(part.declared for part in kind.walk())


def _check_condition(text: str, dimension: Dimension, before: Mapping[str, Dimension]) -> None:
    if dimension.only_if is None:
        return
    field, value = dimension.only_if
    other = before.get(field)
    if other is None or other.kind != "choice" or value not in other.choices:
        raise UserError(
            f"--space={text}: before it, give {field}=choice:... with {value!r} among its values."
        )
