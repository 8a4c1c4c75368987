"""Calibration: the published rows, and the fit of prices to them."""

import dataclasses
import os
import subprocess
import sys

import pytest

from tests.benchmarks.calibration import fit
from tests.benchmarks.calibration.recording import (
    Event,
    predict_seconds,
    read_rows,
    record,
    write_rows,
)
from tests.benchmarks.calibration.rows import ROWS
from tests.support.programs.collectives import FUSIONS, PAIR, SLICE, compiled
from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.pricing import collectives
from tftpu.preflight.pricing.cost import price
from tftpu.preflight.pricing.prices import BASES, PRICES, Prices
from tftpu.tpu.slices import parse_slice

BEFORE = Prices(bandwidth=0.8, matrix=0.5, window=0.5, vector=0.5, kernel=0.5, links=1.0)
TRUE = Prices(bandwidth=0.7, matrix=0.6, window=0.35, vector=0.7, kernel=0.6, links=0.8)
# (kind, estimate, products, traffic), in seconds, of what each kind of model spends its time on.
DENSE = (
    *(("matrix", 0.010, 0.008, 0.001), ("matrix", 0.004, 0.0001, 0.0005)),
    *(("reduction", 0.003, 0.0, 0.0005), ("copy", 0.003, 0.0, 0.002)),
)
SEPARABLE = (("window", 0.020, 0.001, 0.002), ("elementwise", 0.005, 0.0, 0.0045), *DENSE[:1])
GATHERING = (("gather", 0.008, 0.0, 0.001), ("elementwise", 0.001, 0.0, 0.004), *DENSE[1:2])
ATTENDING = (("kernel", None, 0.010, 0.001), *DENSE[:2])


def row(name: str, parts, slice_name: str = "v3-8", factor: float = 1.0, exchange: float = 0.0):
    """Returns a row whose published time is that of `TRUE`, times a factor.

    An exchange runs beside the first part, and the second waits for it.
    """
    works = [Event("run", 0, work=part) for part in parts]
    start, wait = Event("start", 0, exchange, "gather", "slice"), Event("wait", 0, key="gather")
    events = [start, works[0], wait, *works[1:]]
    found = {"name": name, "model": name.split("-")[0], "slice": slice_name, "events": events}
    found |= {"traffic": sum(part[3] for part in parts), "source": "none", "differs": ""}
    found |= {"is_step": name != "gathering"}
    return found | {"step_ms": factor * fit.predict_ms(found, TRUE)}


ALL = [
    *(row("dense", DENSE), row("separable", SEPARABLE), row("gathering", GATHERING)),
    *(row("attending", ATTENDING), row("exchanging", DENSE, exchange=0.03)),
]


def test_the_fit_finds_the_prices_that_made_the_times():
    assert fit.PriceFit(ALL).fit_prices() == TRUE
    assert max(abs(fit.predict_ms(r, BEFORE) / r["step_ms"] - 1) for r in ALL) > 0.1


@pytest.mark.parametrize("program", [PAIR, FUSIONS], ids=["pair", "fusions"])
@pytest.mark.parametrize("cycles", [10**3, 6 * 10**5])
@pytest.mark.parametrize("links", [PRICES.links, 0.5])
def test_a_recorded_step_is_priced_as_the_step(program, cycles, links, tmp_path, monkeypatch):
    step = LoweredStep(program=b"", arguments=["a", "b"], precision="float32")
    done = compiled(program.replace("CYCLES", str(cycles)))
    write_rows([record(step, done, SLICE)], tmp_path / "rows")
    [found] = read_rows(tmp_path / "rows")
    prices = dataclasses.replace(PRICES, links=links)
    monkeypatch.setattr(collectives, "PRICES", prices)
    expected = price(step, done, SLICE).seconds
    replayed = predict_seconds(found["events"], found["traffic"], prices)
    assert replayed == pytest.approx(expected, rel=0.02)  # hops take as long at any bandwidth


def test_a_model_left_out_has_no_part_in_the_prices():
    slower = [row("dense", DENSE), row("separable-1", SEPARABLE, factor=1.3)]
    slower += [row("separable-2", SEPARABLE, factor=1.3), row("gathering", GATHERING)]
    errors = fit.PriceFit(slower).compute_left_out_errors()
    assert errors.keys() == {"dense", "separable-1", "separable-2", "gathering"}
    # The others say nothing of the price of windows, which stays as it was: 0.5 for 0.35.
    known = dataclasses.replace(TRUE, window=BEFORE.window)
    expected = fit.predict_ms(slower[1], known) / slower[1]["step_ms"] - 1
    assert errors["separable-1"] == errors["separable-2"] == pytest.approx(expected, abs=0.02)


def test_a_range_holds_nine_in_ten_and_is_wider_where_less_was_published():
    errors = {f"dense-{number}": -0.01 * number for number in range(1, 18)}
    errors |= {"separable": 0.25, "gathering": 0.08, "other": -0.05}
    parts = {"separable": SEPARABLE, "gathering": GATHERING}
    places = {"other": "v5e-8", "gathering": "v4-8"}
    rows = [row(name, parts.get(name, DENSE), places.get(name, "v3-8")) for name in errors]
    found = fit.compute_bases(rows, errors)
    off = sorted(abs(1 / (1 + error) - 1) for error in errors.values())
    assert found.keys() == BASES.keys()
    assert (found["v3"].steps, found["v3"].models, found["v3"].operations) == (18, 2, 0)
    assert 0 <= found["v3"].high - 1 - off[17] <= 0.01  # two of twenty are further off
    assert (found["v5e"].steps, found["v5e"].models) == (1, 1)
    assert (found["v4"].steps, found["v4"].models, found["v4"].operations) == (0, 0, 1)
    assert 0 <= found["v5e"].high - 1 - 1.5 * off[17] <= 0.01
    assert found["v6e"].steps == 0 and found["v6e"].high == found["v5e"].high
    assert all(basis.low == pytest.approx(2 - basis.high) for basis in found.values())


def test_every_row_has_a_slice_and_a_source_and_a_name_of_its_own():
    for published in ROWS:
        assert parse_slice(published.slice).name == published.slice
        assert published.step_ms > 0 and published.source
        assert BASES[parse_slice(published.slice).generation.name].steps > 0
    assert len({published.name for published in ROWS}) == len(ROWS)


def test_the_bases_in_use_count_the_rows():
    for generation, basis in BASES.items():
        own = [r for r in ROWS if parse_slice(r.slice).generation.name == generation]
        steps = [r.model for r in own if r.is_step]
        counts = len(steps), len(set(steps)), len(own) - len(steps)
        assert (basis.steps, basis.models, basis.operations) == counts
        assert basis.low < 1 < basis.high


@pytest.mark.slow
@pytest.mark.compiles
def test_a_published_product_is_predicted(tmp_path):
    """The command, on the one row that compiles in seconds."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.calibration", "product-v6e-1"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if "product-v6e-1" in line)
    assert line.split(" | ")[1:4] == ["1.7 ms", "1.72 ms", "-1.1 %"]
