"""The zoo: published sizes by name, clear errors, and models that Keras can save."""

import dataclasses

import keras
import numpy as np
import pytest

import tftpu
from tests.support.models import zoo
from tftpu import models
from tftpu.config import PerReplicaBatch
from tftpu.models.families import gpt
from tftpu.models.layers.pointwise import PointwiseConv

# Trainable parameters. Where no paper or library gives them to the last digit, they were checked
# against the paper's rounded figure.
PUBLISHED = {
    # torchvision's model tables
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "convnext_tiny": 28_589_128,
    "convnext_small": 50_223_688,
    "convnext_base": 88_591_464,
    "efficientnetv2_s": 21_458_488,
    "efficientnetv2_m": 54_139_356,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
    # Keras Applications (7,200,312 with 60,608 moving statistics)
    "efficientnetv2_b0": 7_139_704,
    # timm's result tables, 5.72 M and 22.05 M
    "vit_ti16": 5_717_416,
    "vit_s16": 22_050_664,
    # Hugging Face Transformers, BertForMaskedLM
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    # Hugging Face Transformers, GPT2LMHeadModel
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    # llama2.c's stories110M; the model cards of Llama 3.2 1B (1.23 B) and Llama 3 8B (8.03 B)
    "llama_110m": 109_529_856,
    "llama_1b": 1_235_814_400,
    "llama_7b": 6_738_415_616,
    "llama_8b": 8_030_261_248,
}


def without_weights(name: str) -> keras.Model:
    """Returns the model with variables without values: an 8B model takes no memory."""
    with keras.StatelessScope(initialize_variables=False):
        model = models.build(name)
    keras.utils.clear_session()  # or the next scope would initialise them after all
    return model


def test_every_name_has_a_published_count():
    assert sorted(PUBLISHED) == models.names()
    assert {name: models.parameters(name) for name in models.names()} == PUBLISHED


@pytest.mark.medium
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_as_many_as_published(name):
    model = without_weights(name)
    assert sum(np.prod(v.shape) for v in model.trainable_variables) == PUBLISHED[name]


@pytest.mark.medium
def test_parameters_counted_without_values_equal_those_of_a_built_model():
    built = models.build("vit_ti16").trainable_variables
    assert sum(v.numpy().size for v in built) == PUBLISHED["vit_ti16"]


@pytest.mark.medium
@pytest.mark.parametrize("family", zoo.TINY)
def test_any_image_size_or_sequence_length_works(family):
    config = zoo.TINY[family]
    if hasattr(config, "image_size"):
        model = zoo.build(family, image_size=24)
        assert model(np.zeros((2, 24, 24, 3), np.float32)).shape == (2, 5)
        return
    model = models.build(config)
    for time in (1, 7, 12):
        logits = model(np.zeros((2, time), np.int32))
        assert logits.shape == (2, 5) if family == "bert_classes" else (2, time, 20)


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_a_sequence_longer_than_the_learned_positions_fails(family):
    with pytest.raises(ValueError, match="13 tokens, more than the model's context of 12"):
        models.build(zoo.TINY[family])(np.zeros((2, 13), np.int32))


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("vit_b16", "image_size", 225, "225 is not a multiple of model.patch 16"),
        ("vit_b16", "pooling", "men", "Did you mean 'mean'"),
        ("vit_b16", "heads", 7, "768 is not a multiple of model.heads 7"),
        ("vit_b16", "attention", "flsh", "Did you mean 'flash'"),
        ("vit_b16", "stochastic_depth", 1.0, "model.stochastic_depth is 1.0"),
        ("bert_base", "head", "masked", "Did you mean 'masked_lm'"),
        ("bert_base", "dropout", -0.1, "model.dropout is -0.1"),
        ("llama_1b", "kv_heads", 5, "kv_heads 5 does not divide model.heads 32"),
        ("llama_1b", "heads", 2048, "odd number of channels"),
        ("llama_1b", "rope_scaling", 0.5, "rope_scaling is 0.5"),
        ("convnext_tiny", "widths", (96, 192), "widths has 2 entries, but model.blocks has 4"),
        ("efficientnetv2_s", "strides", (1, 2), "strides has 2 entries, but model.blocks has 6"),
        ("efficientnetv2_s", "norm_batch", 48, "does not divide the 64 examples"),
        ("resnet18", "blocks", (), r"model.blocks is \(\): give it an entry for each stage"),
        ("resnet18", "blocks", (-1, 1), "it must be 1 or more"),
        ("resnet18", "blocks", (99999999,), "it must be 10,000 or less"),
        ("gpt2_small", "layers", 10**9, "it must be 10,000 or less"),
        ("gpt2_small", "vocabulary", 10**12, "it must be 2,147,483,647 or less"),
        ("resnet18", "width", 0, "model.width is 0: it must be 1 or more"),
    ],
)
def test_a_wrong_field_fails_with_a_clear_error_before_the_model_is_built(name, field, value, said):
    with pytest.raises(tftpu.UserError, match=said):
        models.config(name, **{field: value}).validate(PerReplicaBatch(512, 8, 1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"width": 0}, "model.width is 0: it must be 1 or more"),
        ({"width": "a"}, "model.width is 'a': its type must be int"),
        ({"blocks": ()}, r"model.blocks is \(\)"),
        ({"blocks": (-1, 1)}, "it must be 1 or more"),
        ({"blocks": 3}, "its type must be tuple"),
        ({"dropout": 2.0}, "model.dropout is 2.0"),
        ({"norm_batch": 0}, "model.norm_batch is 0"),
    ],
)
def test_build_refuses_such_fields_too(fields, said):
    with pytest.raises(tftpu.UserError, match=said):
        models.build("resnet18", **fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_size_is_valid(name):
    models.config(name).validate(PerReplicaBatch(512, 8, 1))


@pytest.mark.medium
@pytest.mark.parametrize("family", zoo.TINY)
def test_a_model_can_be_saved_and_loaded_by_keras(family, tmp_path):
    model = models.build(zoo.TINY[family])
    x, _ = zoo.batch(family)
    model.save(tmp_path / "model.keras")
    custom = {type(layer).__name__: type(layer) for layer in [*model.layers, model]}
    custom["_gelu"] = gpt._gelu
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=custom)
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5, atol=1e-6)
    assert loaded.hyperparameters == zoo.TINY[family]  # so that weight files still fit


@pytest.mark.medium
def test_a_resnet_of_large_groups_can_be_saved_and_loaded_by_keras(tmp_path):
    model = zoo.build("resnet", norm_batch=64)
    assert any(isinstance(layer, PointwiseConv) for layer in model.layers)
    x, _ = zoo.batch("resnet")
    model.save(tmp_path / "model.keras")
    custom = {type(layer).__name__: type(layer) for layer in [*model.layers, model]}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=custom)
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_config_without_a_model_fails_with_a_clear_error():
    with pytest.raises(tftpu.UserError, match="has no method build"):
        models.build(tftpu.config.ModelConfig("mine"))


def test_fields_are_for_names_only():
    with pytest.raises(tftpu.UserError, match="only together with a model's name"):
        models.build(zoo.TINY["gpt"], layers=3)


IMAGES = {
    **{name: model for name, model in zoo.TINY.items() if hasattr(model, "image_size")},
    "imagenet": dataclasses.replace(zoo.TINY["resnet"], stem="imagenet", image_size=32),
    "blocks": dataclasses.replace(zoo.TINY["resnet"], stem="space_to_depth", image_size=32),
    "pointwise": dataclasses.replace(zoo.TINY["resnet"], norm_batch=64),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", IMAGES)
def test_a_model_is_the_same_whatever_order_of_dimensions_keras_is_set_to(name):
    config = IMAGES[name]

    def build():
        keras.utils.set_random_seed(1)
        return models.build(config)

    size = config.image_size
    x = np.random.default_rng(0).normal(size=(2, size, size, 3)).astype("float32")
    expected = build()
    before = keras.config.image_data_format()
    keras.config.set_image_data_format("channels_first")
    try:
        model = build()
        given = [v.shape for v in model.weights]
        assert given == [v.shape for v in expected.weights]
        np.testing.assert_array_equal(model(x), expected(x))
    finally:
        keras.config.set_image_data_format(before)


def test_a_published_name_without_its_sizes_is_refused():
    with pytest.raises(tftpu.UserError, match=r"write tftpu.models.config\('llama_8b'\)"):
        models.build(models.sizes.Llama("llama_8b", context=64))
    models.build(models.sizes.ViT("vit_s16x", image_size=32, layers=1))
