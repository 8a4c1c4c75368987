"""`tftpu.KerasHub` as a config: what it takes, and what it costs to import."""

import subprocess
import sys

import pytest

import tftpu
from tftpu.config import PerReplicaBatch, from_json, to_json
from tftpu.errors import UserError
from tftpu.input_pipelines.sources import Texts


def test_a_config_imports_no_keras():
    code = (
        "import sys, tftpu; from tftpu.input_pipelines.sources import Texts;"
        "tftpu.Experiment(tftpu.KerasHub('gemma3_1b', task='causal_lm'), Texts('t', 8));"
        "sys.exit(any(name in sys.modules for name in ('keras', 'keras_hub', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_config_json_gives_the_same_experiment():
    model = tftpu.KerasHub(
        "gemma3_1b", "causal_lm", weights="none", overrides={"num_layers": 2}, lora=4
    )
    assert (model.preset, model.task, model.name) == ("gemma3_1b", "causal_lm", "")
    experiment = tftpu.Experiment(model, Texts(train_text="a.txt"))
    assert from_json(to_json(experiment)) == experiment


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "model.preset is empty"),
        ({"preset": "x", "weights": "all"}, "model.weights"),
        ({"preset": "x", "overrides": {"num_layers": 2}}, "model.weights=none"),
        ({"preset": "x", "num_classes": -1}, "model.num_classes"),
    ],
)
def test_values_that_do_not_go_together_are_refused(fields, said):
    with pytest.raises(UserError, match=said):
        tftpu.KerasHub(**fields).validate(PerReplicaBatch(8, 1))
