"""Scripts in the manner of Keras's examples: `Trainer` computes what Keras computes."""

import pytest

from tests.compatibility import running, table
from tests.support.repository.cases import mostly_rare
from tests.support.repository.checkout import ROOT

NAMES = running.names()
SCRIPTS = {name: running.load(name) for name in NAMES}
PREFLIGHT = [name for name, script in SCRIPTS.items() if script.preflight]
# Of the layers, losses and steps that scripts have, many that differ.
USUAL = (
    *("actor_critic", "batch_normalization", "convlstm", "diffusion", "distillation"),
    *("fraud_weights", "gan", "graph_attention", "image_cnn", "lora", "multi_output"),
    *("object_detection", "pointnet", "resnet_group_norm", "seq2seq_lstm", "siamese_triplet"),
    *("simclr", "switch_transformer", "text_cnn", "two_tower_retrieval", "vae", "vq_vae"),
)
COMPILED = ("gan", "unet")


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(NAMES, USUAL))
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
@pytest.mark.parametrize("name", mostly_rare(PREFLIGHT, COMPILED))
def test_compiles_for_a_tpu(name):
    verdict = running.preflight(SCRIPTS[name])
    assert verdict.fits and verdict.step_ms > 0, verdict.error


def test_there_are_enough_scripts():
    assert len(NAMES) >= 40
    assert len(PREFLIGHT) >= 10
    assert {"bilstm", "unet", "gan", "ctc_speech"} <= set(PREFLIGHT)


def test_the_table_has_every_script_and_its_reason():
    rows = table.rows()
    assert list(rows) == NAMES
    for name, script in SCRIPTS.items():
        _, _, what, _, one, four, compiled, _ = rows[name].split("|")
        assert what.strip().startswith(running.title(name).rstrip("."))
        assert float(one) <= running.TOLERANCE
        assert (float(four) > running.TOLERANCE) == bool(script.differs)
        for note, applies in zip(table.NOTES, (script.sparse, script.differs), strict=True):
            assert (f"[{table.NOTES.index(note) + 1}]" in what) == bool(applies)
        assert bool(compiled.strip()) == script.preflight
    assert "compatibility.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.slow  # builds all models
def test_the_table_names_the_way_of_every_script():
    rows = table.rows()
    ways = {name: rows[name].split("|")[3].strip(" `") for name in NAMES}
    assert ways == {name: script.way for name, script in SCRIPTS.items()}
    assert set(ways.values()) == {"fit", "compute_loss", "loss_fn", "objectives"}
