"""The table of `tests.benchmarks.compiled.zoo_preflight`: a row for each slice, or why not."""

import pytest

from tests.benchmarks.compiled import zoo_preflight
from tftpu import models, preflight
from tftpu.models.sizes import PARAMETERS
from tftpu.preflight import Report, SliceReport

GIB = 2**30


def test_every_family_of_the_zoo_has_a_published_size():
    families = {type(models.config(name)) for name in PARAMETERS}
    assert {type(models.config(row.size)) for row in zoo_preflight.ROWS.values()} == families
    assert all(row.size in PARAMETERS for row in zoo_preflight.ROWS.values())


def report(**fields):
    return SliceReport("v2-8", 8, 32, hbm_limit_bytes=8 * GIB, **fields)


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            report(
                **{"compiles": True, "fits": True, "hbm_bytes": 2 * GIB, "mfu": 0.25},
                **{"step_ms": 12.5, "usd_per_1000_steps": 0.125},
            ),
            ("2 GiB of 8 GiB", "12.5 ms", "25.0%", "12.5 cents"),
        ),
        (
            report(compiles=True, hbm_bytes=9 * GIB, largest_per_core_batch=24),
            ("9 GiB of 8 GiB", "out of memory: 24 per device fit", "", ""),
        ),
        (
            report(compiles=True, hbm_bytes=9 * GIB, largest_per_core_batch=0),
            ("9 GiB of 8 GiB", "out of memory: not even the smallest batch fits", "", ""),
        ),
        (report(error="a|b\nc"), ("", "does not compile: a/b c", "", "")),
    ],
    ids=["fits", "too large", "never fits", "fails"],
)
def test_a_slice_gets_its_figures_or_the_reason_why_not(item, shown):
    assert zoo_preflight.figures(item) == shown


def test_each_slice_of_a_family_has_a_row(monkeypatch, capsys):
    def check(model_fn, spec, slices, options):
        assert [part.shape.as_list() for part in spec] == [[256, 128], [256, 128]]
        found = [SliceReport(name, 8, 32, error="the compiler is away") for name in slices]
        return Report(256, "mixed_bfloat16", None, found)

    monkeypatch.setattr(preflight, "check", check)
    zoo_preflight.main(["--families=bert", "--slices=v3-8,v5e-8"])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| bert_base | 256 | v3-8 | 32 |  | does not compile: the compiler is away |  |  |",
        "| bert_base | 256 | v5e-8 | 32 |  | does not compile: the compiler is away |  |  |",
    ]


def test_a_family_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        zoo_preflight.main(["--families=bert,alexnet"])
    assert "there are resnet, convnext" in capsys.readouterr().err
