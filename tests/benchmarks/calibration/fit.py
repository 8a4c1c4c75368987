"""Fits preflight's prices to published step times, and says how far predictions may be off."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from tftpu.preflight.pricing.prices import BASES, PRICES, Basis, Prices
from tftpu.tpu.slices import parse_slice

Row = dict[str, Any]  # as `measure.measured` returns it

# Values that are tried for each price.
_TRIED = {
    "bandwidth": (0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    "matrix": (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
    "window": (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6),
    "vector": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
}
# What the first calibration found, with ResNet-50 alone. The rows are few, and say little of one
# price beside another: each moves from here only as far as the rows show.
_PRIOR = Prices(bandwidth=0.8, matrix=0.5, window=0.5, vector=0.5, kernel=0.5)
_PULL = 1e-4  # loss for a price that is 0.1 away from there
_CANDIDATES = [
    dataclasses.replace(_PRIOR, **dict(zip(_TRIED, values)))
    for values in itertools.product(*_TRIED.values())
]
_NEGLIGIBLE = 1e-3  # of a step: instructions that take less keep their price while prices are tried
_USUAL, _FEW = 1.5, 2.5  # half of a range, in mean errors: of two models or more, and of fewer


def predict_ms(row: Row, prices: Prices) -> float:
    """Returns the time of a row's step with other prices, in milliseconds."""
    one_by_one = 0.0
    for work in row["works"]:
        if work["overlaps"]:
            continue
        fixed = work["kind"] == "collective" or work["seconds"] < _NEGLIGIBLE * row["step_ms"] / 1e3
        given = work["estimate"], work["products"], work["traffic"]
        one_by_one += work["seconds"] if fixed else prices.estimate_seconds(work["kind"], *given)
    traffic = sum(work["traffic"] for work in row["works"])
    return 1e3 * max(one_by_one, traffic / prices.bandwidth)


class PriceFit:
    """Prices with the least error: the mean of squares over models, of logarithms.

    All combinations are tried. A price of which the rows say nothing stays as it was before.

    Args:
        rows: published step times.
    """

    def __init__(self, rows: Sequence[Row]):
        self._rows = rows
        self._squares = {
            row["name"]: [
                math.log(predict_ms(row, prices) / row["step_ms"]) ** 2 for prices in _CANDIDATES
            ]
            for row in rows
        }

    def fit_prices(self, without: str = "") -> Prices:
        """Returns the prices that fit all rows but those of a model."""
        models = collections.defaultdict(list)
        for row in self._rows:
            if row["model"] != without:
                models[row["model"]].append(self._squares[row["name"]])

        def loss(index: int) -> float:
            means = [sum(row[index] for row in rows) / len(rows) for rows in models.values()]
            return sum(means) / len(means) + _PULL * _compute_distance(_CANDIDATES[index])

        return _CANDIDATES[min(range(len(_CANDIDATES)), key=loss)]

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

    The range holds the errors of models left out of the fit that the generation has, and is no
    narrower than one and a half times the root of the mean square over all of them; for a
    generation of fewer than two models, two and a half times.

    Args:
        rows: published step times.
        errors: of each row, as `PriceFit.compute_left_out_errors` returns them.
    """
    off = {name: abs(1 / (1 + error) - 1) for name, error in errors.items()}
    usual = math.sqrt(sum(value**2 for value in off.values()) / len(off))
    found = {}
    for generation in BASES:
        own = [row for row in rows if _find_generation(row) == generation]
        models = {row["model"] for row in own}
        width = (_USUAL if len(models) > 1 else _FEW) * usual
        width = max([width, *(off[row["name"]] for row in own)])
        width = math.ceil(100 * width + 1) / 100
        found[generation] = Basis(len(own), len(models), round(1 - width, 2), round(1 + width, 2))
    return found


def _find_generation(row: Row) -> str:
    return parse_slice(row["slice"]).generation.name


def compare(rows: Sequence[Row], without: dict[str, float]) -> None:
    """Prints the predicted and the published time of each row.

    Args:
        rows: published step times.
        without: errors of rows, by name, as `PriceFit.compute_left_out_errors` returns them; may
        be empty.
    """
    print(f"{'row':26}{'published':>12}{'predicted':>12}{'error':>9}{'range':>20}{'left out':>10}")
    for row in rows:
        ms, basis = row["predicted_ms"], BASES[_find_generation(row)]
        low, high = ms * basis.low, ms * basis.high
        error = f"{without[row['name']]:+10.1%}" if without else ""
        outside = "" if low <= row["step_ms"] <= high else " outside"
        print(
            f"{row['name']:26}{row['step_ms']:12.4g}{ms:12.4g}{ms / row['step_ms'] - 1:+9.1%}"
            f"{low:10.4g} -{high:8.4g}{error}{outside}"
        )
    for row in rows:
        print(f"{row['name']}: {'; '.join(filter(None, (row['source'], row['differs'])))}")


def report(rows: Sequence[Row]) -> None:
    """Prints the rows, the prices that fit them, and the ranges that follow."""
    fit = PriceFit(rows)
    without = fit.compute_left_out_errors()
    compare(rows, without)
    errors = [abs(row["predicted_ms"] / row["step_ms"] - 1) for row in rows]
    print(f"mean absolute error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}, ", end="")
    print(f"worst of a model left out {max(map(abs, without.values())):.1%}")
    print(f"in use: {PRICES}")
    print(f"fitted: {fit.fit_prices()}")
    for name, basis in compute_bases(rows, without).items():
        print(f"{name}: in use {BASES[name]}, found {basis}")
