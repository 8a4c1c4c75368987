"""Fits preflight's prices to published step times, and says how far predictions may be off."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from tftpu.preflight.prices import BASES, PRICES, Basis, Prices

Row = dict[str, Any]  # as `measure.measured` returns it

# Values that are tried for each price.
_TRIED = {
    "bandwidth": (0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    "matrix": (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
    "window": (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6),
    "vector": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
}
_CANDIDATES = [
    dataclasses.replace(PRICES, **dict(zip(_TRIED, values)))
    for values in itertools.product(*_TRIED.values())
]
_NEGLIGIBLE = 1e-3  # of a step: instructions that take less keep their price while prices are tried
_FEW = 1.5  # factor for the range of a generation of which fewer than two models are published


def predicted_ms(row: Row, prices: Prices) -> float:
    """Returns the time of a row's step with other prices, in milliseconds."""
    one_by_one = 0.0
    for work in row["works"]:
        if work["overlaps"]:
            continue
        fixed = work["kind"] == "collective" or work["seconds"] < _NEGLIGIBLE * row["step_ms"] / 1e3
        given = work["estimate"], work["products"], work["traffic"]
        one_by_one += work["seconds"] if fixed else prices.seconds(work["kind"], *given)
    traffic = sum(work["traffic"] for work in row["works"])
    return 1e3 * max(one_by_one, traffic / prices.bandwidth)


class Fit:
    """Prices with the least error: the mean of squares over models, of logarithms.

    All combinations are tried. A price of which the rows say nothing stays as it is in use.

    Args:
        rows: published step times.
    """

    def __init__(self, rows: Sequence[Row]):
        self._rows = rows
        self._squares = {
            row["name"]: [
                math.log(predicted_ms(row, prices) / row["step_ms"]) ** 2 for prices in _CANDIDATES
            ]
            for row in rows
        }

    def prices(self, without: str = "") -> Prices:
        """Returns the prices that fit all rows but those of a model."""
        models = collections.defaultdict(list)
        for row in self._rows:
            if row["model"] != without:
                models[row["model"]].append(self._squares[row["name"]])

        def loss(index: int) -> tuple[float, float]:
            means = [sum(row[index] for row in rows) / len(rows) for rows in models.values()]
            return round(sum(means) / len(means), 7), _changed(_CANDIDATES[index])

        return _CANDIDATES[min(range(len(_CANDIDATES)), key=loss)]

    def left_out(self) -> dict[str, float]:
        """Returns the error of each row, by name, at prices that know no row of its model."""
        found = {}
        for model in {row["model"] for row in self._rows}:
            prices = self.prices(without=model)
            for row in self._rows:
                if row["model"] == model:
                    found[row["name"]] = predicted_ms(row, prices) / row["step_ms"] - 1
        return found


def _changed(prices: Prices) -> float:
    """Returns how far prices are from those in use."""
    return sum(abs(getattr(prices, name) - getattr(PRICES, name)) for name in _TRIED)


def bases(rows: Sequence[Row], errors: dict[str, float]) -> dict[str, Basis]:
    """Returns what predictions for each generation rest on.

    The range is that of the errors of models left out: the worst one of the generation, but no less
    than the mean over all; for a generation of fewer than two models, half as much again as the
    worst of all.

    Args:
        rows: published step times.
        errors: of each row, as `Fit.left_out` returns them.
    """
    off = {name: abs(1 / (1 + error) - 1) for name, error in errors.items()}
    mean = sum(off.values()) / len(off)
    found = {}
    for generation in BASES:
        own = [row for row in rows if row["slice"].split("-")[0] == generation]
        models = {row["model"] for row in own}
        width = max(mean, *(off[row["name"]] for row in own)) if own else mean
        if len(models) < 2:
            width = max(width, _FEW * max(off.values()))
        width = math.ceil(100 * width + 1) / 100
        found[generation] = Basis(len(own), len(models), round(1 - width, 2), round(1 + width, 2))
    return found


def compare(rows: Sequence[Row], without: dict[str, float]) -> None:
    """Prints the predicted and the published time of each row.

    Args:
        rows: published step times.
        without: errors of rows, by name, as `Fit.left_out` returns them; may be empty.
    """
    print(f"{'row':26}{'published':>12}{'predicted':>12}{'error':>9}{'range':>20}{'left out':>10}")
    for row in rows:
        ms, basis = row["predicted_ms"], BASES[row["slice"].split("-")[0]]
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
    fit = Fit(rows)
    without = fit.left_out()
    compare(rows, without)
    errors = [abs(row["predicted_ms"] / row["step_ms"] - 1) for row in rows]
    print(f"mean absolute error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}, ", end="")
    print(f"worst of a model left out {max(map(abs, without.values())):.1%}")
    print(f"in use: {PRICES}")
    print(f"fitted: {fit.prices()}")
    for name, basis in bases(rows, without).items():
        print(f"{name}: in use {BASES[name]}, found {basis}")
