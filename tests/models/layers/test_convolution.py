"""Convolutions whose kernels are integers compute what their dequantized kernels do."""

import keras
import numpy as np
import pytest

import tftpu
from tests.support.models import zoo
from tests.support.models.strategies import relative
from tests.support.models.training import compiled
from tftpu import layer_internals as internals
from tftpu import models
from tftpu.models import adapters
from tftpu.models.layers.convolution import Conv2D, DepthwiseConv2D, QuantizedConvolution

CNNS = ["resnet", "efficientnetv2", "convnext"]
KINDS = {"conv": Conv2D(5, 3, name="conv"), "depthwise": DepthwiseConv2D(3, 2, name="depthwise")}
SAID = "ignore:.*does not have a `quantize` method"


def layer(kind: str) -> tuple[keras.Model, QuantizedConvolution]:
    """Returns a model of one convolution; 3 and 5 channels leave half a byte with 4 bits."""
    keras.utils.set_random_seed(0)
    config = KINDS[kind].get_config()
    found = type(KINDS[kind]).from_config(config)
    return keras.Sequential([keras.Input((8, 8, 3)), found]), found


def images(size: int = 8) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, size, size, 3)).astype("float32")


def built(family: str) -> keras.Model:
    """Returns the tiny model of a family; scales of zeros would hide its blocks."""
    keras.utils.set_random_seed(0)
    model = zoo.build(family)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        if not np.any(np.asarray(variable)):
            variable.assign(rng.normal(0.0, 0.3, variable.shape))
    return model


def output(model: keras.Model, family: str) -> np.ndarray:
    return np.asarray(model(zoo.batch(family)[0], training=False))


def convolutions(model: keras.Model) -> list:
    return [v for v in model.layers if isinstance(v, QuantizedConvolution)]


@pytest.mark.parametrize("mode, most", [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_channel_is_rounded_by_its_largest_value(kind, mode, most):
    model, conv = layer(kind)
    kernel, bias = (np.asarray(v) for v in conv.get_weights())
    channels = (-2, -1) if kind == "depthwise" else (-1,)
    others = tuple(n for n in range(4) if n - 4 not in channels)
    step = np.abs(kernel).max(others, keepdims=True) / most
    rounded = np.clip(np.round(kernel / step), -128 if mode == "int8" else -8, most) * step
    plain, same = layer(kind)
    same.set_weights([rounded, bias])
    conv.quantize(mode)
    assert conv.quantization_mode == mode
    # Keras adds 1e-7 to the largest value.
    np.testing.assert_allclose(np.asarray(model(images())), plain(images()), rtol=1e-5, atol=1e-5)
    stored = {v.name: v for v in conv.weights}
    assert stored["kernel"].dtype == "int8" and not stored["kernel"].trainable
    half = np.prod(kernel.shape) // 2
    assert mode == "int8" or half <= np.prod(stored["kernel"].shape) <= 1.4 * half


@pytest.mark.parametrize("kind", KINDS)
def test_other_modes_leave_the_layer_as_it_is(kind):
    model, conv = layer(kind)
    before = np.asarray(model(images()))
    with pytest.warns(UserWarning, match="can be quantized to int8 or int4, not to float8"):
        model.quantize("float8")
    assert conv.quantization_mode is None
    assert np.array_equal(np.asarray(model(images())), before)


@pytest.mark.medium
@pytest.mark.filterwarnings(SAID)
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("family", CNNS)
def test_a_quantized_cnn_computes_what_its_merged_weights_do(family, mode):
    model = built(family)
    before = output(model, family)
    model.quantize(config=zoo.weights_alone(mode))
    assert {v.quantization_mode for v in convolutions(model)} == {mode}
    assert 0 < relative(output(model, family), before) < {"int8": 0.05, "int4": 0.7}[mode]
    twin = zoo.build(family)
    values = adapters.merge_weights(model)
    for variable in twin.weights:
        variable.assign(values[variable.path])
    assert relative(output(twin, family), output(model, family)) < 5e-6


def test_kernels_of_other_kinds_are_refused():
    conv = Conv2D(4, 3, dtype="float8_from_float32", name="conv")
    with pytest.raises(NotImplementedError, match="'conv' cannot have the dtype 'float8"):
        conv.build((None, 8, 8, 3))


FEW = ["efficientnetv2", "vit", "llama", "gpt"]  # every class of attention is in one of them
RARE = pytest.mark.exhaustive
OTHERS = [pytest.param(f, marks=RARE) for f in zoo.TINY if f not in FEW]


@pytest.mark.medium
@pytest.mark.filterwarnings(SAID)
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("family", [*FEW, *OTHERS])
def test_a_quantized_model_is_saved_and_read_again(family, mode, tmp_path):
    model = built(family)
    model.quantize(mode)
    path = str(tmp_path / "model.keras")
    model.save(path)
    read = keras.saving.load_model(path)
    modes = [v.quantization_mode for v in internals.flatten_layers(model)]
    assert mode in modes
    assert modes == [v.quantization_mode for v in internals.flatten_layers(read)]
    assert np.any(output(model, family))
    assert np.array_equal(output(read, family), output(model, family))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["vit", *(pytest.param(f, marks=RARE) for f in ("bert", "gpt", "llama"))]
)
def test_adapters_above_integers_are_saved_and_read_again(family, tmp_path):
    model = built(family)
    models.enable_lora(model, 2, base="int8")
    path = str(tmp_path / "model.keras")
    model.save(path)
    read = keras.saving.load_model(path)
    assert relative(output(read, family), output(model, family)) < 5e-6


@pytest.mark.slow
@pytest.mark.filterwarnings(SAID)
def test_a_quantized_model_trains_adapters_above_its_integers():
    model = built("resnet")
    model.quantize("int8")
    with pytest.raises(tftpu.UserError, match="is already quantized to int8"):
        models.enable_lora(model, 2, "*_conv", "int4")
    model = built("resnet")
    model.quantize("int8")
    assert models.enable_lora(model, 2, "*_conv", "int8")
    x, y = (np.asarray(part) for part in zoo.batch("resnet"))
    tftpu.Trainer(compiled(model)).fit(x, y, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["", "int8", "int4"])
def test_adapters_of_convolutions_train_above_integers_and_are_merged(base, tmp_path):
    model = built("resnet")
    adapted = models.enable_lora(model, 2, "*_conv", base)
    assert len(adapted) > 4
    before = {v.path: np.asarray(v) for v in model.weights}
    x, y = zoo.batch("resnet")
    tftpu.Trainer(compiled(model)).fit(np.asarray(x), np.asarray(y), epochs=2, verbose=0)
    changed = [v.path for v in model.weights if not np.array_equal(before[v.path], np.asarray(v))]
    assert {path.rsplit("/")[-1] for path in changed} >= {"lora_kernel_a", "lora_kernel_b"}
    assert not [path for path in changed if path.endswith(("/kernel", "_scale"))]
    path = str(tmp_path / "resnet.keras")
    model.save(path)
    if base:
        assert (
            relative(output(keras.saving.load_model(path), "resnet"), output(model, "resnet"))
            < 1e-6
        )
    plain = zoo.build("resnet")
    adapters.assign_merged(plain, model)
    assert relative(output(plain, "resnet"), output(model, "resnet")) < 1e-5


@pytest.mark.medium
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_weights_read_into_quantized_convolutions_are_those_quantized_after_reading(base, tmp_path):
    source = built("resnet")
    path = str(tmp_path / "resnet.safetensors")
    models.save_weights(source, path)
    models.enable_lora(source, 2, "*_conv", base)
    loaded = zoo.build("resnet")
    models.enable_lora(loaded, 2, "*_conv", base)
    report = models.load_weights(loaded, path)
    assert not report.missing and not report.unused
    theirs = {v.path: np.asarray(v) for v in source.weights}
    for variable in loaded.weights:
        if not variable.path.endswith(adapters.ADAPTERS):
            assert np.array_equal(np.asarray(variable), theirs[variable.path]), variable.path
