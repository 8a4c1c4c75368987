"""Fits preflight's prices to published step times, and says how far predictions may be off."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.calibration.recording import predict_seconds
from tftpu.amounts import format_duration
from tftpu.preflight.pricing.prices import BASES, PRICES, Basis, Prices
from tftpu.tpu.slices import parse_slice

Row = dict[str, Any]  # as `measure.measure_row` returns it

# Values that are tried for each price.
_TRIED = {
    "bandwidth": (0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    "matrix": (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
    "window": (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6),
    "vector": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "kernel": (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
    "links": (0.6, 0.7, 0.8, 0.9, 1.0),
}
# What the first calibration found, with ResNet-50 alone. The rows are few, and say little of one
# price beside another: each moves from here only as far as the rows show.
_PRIOR = Prices(bandwidth=0.8, matrix=0.5, window=0.5, vector=0.5, kernel=0.5, links=1.0)
_PULL = 1e-4  # loss for a price that is 0.1 away from there
_FEW = 1.5  # how much wider a range is for a generation of fewer than two models


def predict_ms(row: Row, prices: Prices) -> float:
    """Returns the time of a row's step with other prices, in milliseconds."""
    return 1e3 * predict_seconds(row["events"], row["traffic"], prices)


class PriceFit:
    """Prices with the least error: the mean of squares over models, of logarithms.

    Two prices at a time take the best of all combinations of their values, until none improves. A
    price of which the rows say nothing stays as it was before.

    Args:
        rows: published step times.
    """

    def __init__(self, rows: Sequence[Row]):
        self._rows = rows
        self._squares: dict[Prices, list[float]] = {}

    def fit_prices(self, without: str = "") -> Prices:
        """Returns the prices that fit all rows but those of a model."""
        found, before = _PRIOR, None
        while found != before:
            before = found
            for names in itertools.combinations(_TRIED, 2):
                values = itertools.product(*(_TRIED[name] for name in names))
                tried = [dataclasses.replace(found, **dict(zip(names, pair))) for pair in values]
                found = min([found, *tried], key=lambda p: self._compute_loss(p, without))
        return found

    def _compute_loss(self, prices: Prices, without: str) -> float:
        """Returns the loss over all models but one, each with the mean over its rows."""
        if prices not in self._squares:
            self._squares[prices] = [
                math.log(predict_ms(row, prices) / row["step_ms"]) ** 2 for row in self._rows
            ]
        models = collections.defaultdict(list)
        for row, square in zip(self._rows, self._squares[prices], strict=True):
            if row["model"] != without:
                models[row["model"]].append(square)
        means = [_average(squares) for squares in models.values()]
        return _average(means) + _PULL * _compute_distance(prices)

    def compute_left_out_errors(self) -> dict[str, float]:
        """Returns the error of each row, by name, at prices that know no row of its model."""
        found = {}
        for model in {row["model"] for row in self._rows}:
            prices = self.fit_prices(without=model)
            for row in self._rows:
                if row["model"] == model:
                    found[row["name"]] = predict_ms(row, prices) / row["step_ms"] - 1
        return found


def _compute_distance(prices: Prices) -> float:
    """Returns how far prices are from those before: the sum of squares, in tenths."""
    moves = (getattr(prices, name) - getattr(_PRIOR, name) for name in _TRIED)
    return sum((move / 0.1) ** 2 for move in moves)


def compute_bases(rows: Sequence[Row], errors: dict[str, float]) -> dict[str, Basis]:
    """Returns what predictions for each generation rest on.

    The range holds nine in ten of the rows of all generations, at the errors of models left out
    of the fit; for a generation of fewer than two models it is wider by half. A single
    generation has too few rows for nine in ten of them to say much.

    Args:
        rows: published step times.
        errors: of each row, as `PriceFit.compute_left_out_errors` returns them.
    """
    usual = _hold_most([abs(1 / (1 + error) - 1) for error in errors.values()])
    found = {}
    for generation in BASES:
        own = [row for row in rows if _find_generation(row) == generation]
        models = {row["model"] for row in own}
        width = math.ceil(100 * usual * (1 if len(models) > 1 else _FEW)) / 100
        steps = [row["model"] for row in own if row["is_step"]]
        counts = len(steps), len(set(steps)), len(own) - len(steps)
        found[generation] = Basis(*counts, round(1 - width, 2), round(1 + width, 2))
    return found


def _hold_most(values: Sequence[float]) -> float:
    """Returns the least of these values that nine in ten do not exceed."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _find_generation(row: Row) -> str:
    return parse_slice(row["slice"]).generation.name


def compare(rows: Sequence[Row], without: dict[str, float]) -> None:
    """Prints the predicted and the published time of each row, as a table in Markdown.

    Args:
        rows: published step times.
        without: errors of rows, by name, as `PriceFit.compute_left_out_errors` returns them; may
        be empty.
    """
    print("| run | predicted | published | error | source | left out |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        error = _format_error(row["predicted_ms"] / row["step_ms"] - 1)
        left_out = _format_error(without[row["name"]]) if without else ""
        times = (format_duration(row[name] / 1e3) for name in ("predicted_ms", "step_ms"))
        cells = row["name"], *times, error, row["source"], left_out
        print(f"| {' | '.join(cells)} |")
    for row in rows:
        if row["differs"]:
            print(f"{row['name']}: {row['differs']}")


def _format_error(error: float) -> str:
    return f"{100 * error:+.1f} %"


def report(rows: Sequence[Row]) -> None:
    """Prints the rows, the prices that fit them, and the ranges that follow."""
    fit = PriceFit(rows)
    without = fit.compute_left_out_errors()
    compare(rows, without)
    errors = {row["name"]: row["predicted_ms"] / row["step_ms"] - 1 for row in rows}
    for text, found in (("at the prices in use", errors), ("of models left out", without)):
        off = [abs(error) for error in found.values()]
        print(f"{text}: mean absolute error {_average(off):.1%}, worst {max(off):.1%}")
    inside = [_is_inside(row, errors[row["name"]]) for row in rows]
    print(f"{sum(inside)} of {len(rows)} rows are inside their range")
    print(f"in use: {PRICES}")
    print(f"fitted: {fit.fit_prices()}")
    for name, basis in compute_bases(rows, without).items():
        print(f"{name}: in use {BASES[name]}, found {basis}")


def _is_inside(row: Row, error: float) -> bool:
    basis = BASES[_find_generation(row)]
    return basis.low <= 1 / (1 + error) <= basis.high


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)
