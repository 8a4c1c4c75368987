"""Scripts in the manner of Keras's examples: `Trainer` computes what Keras computes."""

from pathlib import Path

import pytest

from tests.compatibility import running, table

NAMES = running.names()
SCRIPTS = {name: running.load(name) for name in NAMES}
PREFLIGHT = [name for name, script in SCRIPTS.items() if script.preflight]


def _marked(name: str):
    return pytest.param(name, marks=[] if SCRIPTS[name].quick else [pytest.mark.slow])


@pytest.mark.parametrize("name", map(_marked, NAMES))
def test_trains_as_under_keras_on_one_and_on_four_devices(name):
    script = SCRIPTS[name]
    found = running.compare(script)
    assert found.trained > 1e-3  # something to compare
    assert found.one <= running.TOLERANCE
    if script.differs:
        assert found.four > running.TOLERANCE  # the reason still holds
    else:
        assert found.four <= running.TOLERANCE


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("name", PREFLIGHT)
def test_compiles_for_a_tpu(name):
    verdict = running.preflight(SCRIPTS[name])
    assert verdict.fits and verdict.step_ms > 0, verdict.error


def test_there_are_enough_scripts_of_every_kind():
    assert len(NAMES) >= 40
    assert len(PREFLIGHT) >= 10
    assert {"bilstm", "unet", "gan", "ctc_speech"} <= set(PREFLIGHT)
    ways = {script.way for script in SCRIPTS.values()}
    assert ways == {"fit", "compute_loss", "loss_fn", "objectives"}


def test_the_table_has_every_script_and_its_reason():
    rows = table.rows()
    assert list(rows) == NAMES
    for name, script in SCRIPTS.items():
        _, _, what, way, one, four, compiled, _ = rows[name].split("|")
        assert what.strip().startswith(running.title(name).rstrip("."))
        assert way.strip() == f"`{script.way}`"
        assert float(one) <= running.TOLERANCE
        assert (float(four) > running.TOLERANCE) == bool(script.differs)
        for note in [running.SPARSE_GRADIENTS] * script.sparse + [script.differs] * bool(
            script.differs
        ):
            assert f"[{table.NOTES.index(note) + 1}]" in what
        assert bool(compiled.strip()) == script.preflight
    assert "compatibility.md" in (Path(table.PAGE).parent.parent / "mkdocs.yml").read_text()
