"""Adapters alone in a file: a model that loads them gives the outputs of the one that was saved."""

import keras
import numpy as np
import pytest
import safetensors.numpy

import tftpu
from tests.support.models.strategies import relative
from tftpu import models
from tftpu.inference import export

TOKENS = {
    "token_ids": np.random.default_rng(0).integers(1, 64, (2, 16)),
    "padding_mask": np.ones((2, 16), "int32"),
}


def build_dense(units: int = 8) -> keras.Model:
    """Returns a model whose layers have automatic names, which count on with each model."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6,))
    return keras.Model(x, keras.layers.Dense(3)(keras.layers.Dense(units, "relu")(x)))


def build_gpt2() -> keras.Model:
    import keras_hub  # takes seconds

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(64, 2, 2, 32, 64, max_sequence_length=32)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def build_gemma3() -> keras.Model:
    import keras_hub

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=64,
        image_size=16,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=32,
        intermediate_dim=64,
        head_dim=16,
    )
    return keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)


def stir(model: keras.Model) -> None:
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(np.asarray(variable) + rng.normal(0.0, 0.3, variable.shape))


def by_kerashub(model: keras.Model, rank: int) -> None:
    model.backbone.enable_lora(rank)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("adapt", [models.enable_lora, by_kerashub])
@pytest.mark.parametrize("build", [build_gpt2, build_gemma3])
@pytest.mark.slow
def test_a_kerashub_model_gives_the_same_outputs_after_a_round_trip(build, adapt, tmp_path):
    check_round_trip(build, adapt, TOKENS, str(tmp_path / "adapters.safetensors"))


def test_automatic_names_may_count_on(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 6))
    check_round_trip(build_dense, models.enable_lora, x, str(tmp_path / "adapters.safetensors"))


def check_round_trip(build, adapt, x, path: str) -> None:
    saved, loaded = build(), build()
    for model in (saved, loaded):
        adapt(model, 3)
    stir(saved)
    before = np.asarray(saved(x))
    count = models.save_adapters(saved, path)
    assert 0 < count < saved.count_params()
    assert relative(np.asarray(loaded(x)), before) > 0.01
    models.load_adapters(loaded, path)
    np.testing.assert_array_equal(np.asarray(loaded(x)), before)


def test_other_adapters_change_nothing(tmp_path):
    path = str(tmp_path / "adapters.safetensors")
    saved, other = build_dense(), build_dense()
    with pytest.raises(tftpu.UserError, match="has no adapters to write: call"):
        models.save_adapters(saved, path)
    models.enable_lora(saved, 3)
    with pytest.raises(tftpu.UserError, match=r"must end in \.safetensors"):
        models.save_adapters(saved, "adapters.h5")
    models.save_adapters(saved, path)
    with pytest.raises(tftpu.UserError, match="has no adapters to load into: call"):
        models.load_adapters(other, path)
    models.enable_lora(other, 2)
    stir(other)
    before = [np.asarray(v) for v in other.weights]
    with pytest.raises(tftpu.UserError, match=r"Nothing was loaded .*\(6, 2\).* model, .*\(6, 3\)"):
        models.load_adapters(other, path)
    for value, kept in zip(before, other.weights):
        np.testing.assert_array_equal(value, np.asarray(kept))
    safetensors.numpy.save_file({"q.lora_A.weight": np.ones((2, 6), "float32")}, path)
    with pytest.raises(tftpu.UserError, match="PEFT's format: give"):
        models.load_adapters(other, path)


def test_other_ways_to_write_a_model_with_adapters_name_this_one(tmp_path):
    model = build_dense()
    models.enable_lora(model, 3)
    with pytest.raises(
        tftpu.UserError, match=r"save_adapters\(model, .*model\.save\('name.keras'\)"
    ):
        export.write_weights(model, {}, str(tmp_path / "all.safetensors"))
    with pytest.raises(tftpu.UserError, match=r"model\.save .*save_adapters writes only the"):
        models.save_weights(model, str(tmp_path / "all.safetensors"))
