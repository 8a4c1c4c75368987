"""Weights go from files to the devices by parts, and loaded weights are not drawn before."""

import json

import pytest

from tests.support.programs import jax_process


def run(kind, folder):
    return json.loads(jax_process.output("hub.loading", kind, str(folder)).splitlines()[-1])


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    return run("load_presets", tmp_path_factory.mktemp("presets"))


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    return run("assign_values", tmp_path_factory.mktemp("values"))


@pytest.mark.slow
def test_no_device_holds_a_whole_array_while_weights_are_loaded(presets):
    assert len(presets) == 8  # presets by dtype, and Keras's own ways
    for name, found in presets.items():
        assert found["equal"], name
        assert found["whole"] == [] and found["divided"] == 8 and found["assigned"] >= 20, name


@pytest.mark.medium
def test_weights_that_are_loaded_are_not_drawn(presets):
    assert {name: found["drawn"] for name, found in presets.items() if found["drawn"]} == {}


@pytest.mark.slow
def test_an_array_of_another_shape_is_refused_as_by_keras(values):
    plain, sharded = values["errors"]
    assert plain == sharded and plain[0] == "ValueError" and "(64, 64)" in plain[1]


@pytest.mark.medium
def test_a_stateless_scope_takes_the_assigned_value(values):
    assert values["stateless"] == [0.0, True]


def test_a_value_that_a_trace_reads_first_is_drawn_once(values):
    assert values["traced"] == [True, True] and values["drawn"] > 0.1


def test_values_of_a_shared_generator_do_not_depend_on_the_order_of_reading(values):
    assert values["order"]


@pytest.mark.parity
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_a_folder_of_transformers_is_loaded_by_parts(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1024, "head_dim": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads)
    kind = {"Llama": "LlamaForCausalLM", "Gemma3Text": "Gemma3ForCausalLM"}[family]
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    found = run("load_transformers", tmp_path)
    assert found["equal"] and found["whole"] == [] and found["divided"] > 10, found
    assert found["drawn"] == 0
