"""Weights of 8 and 4 bits: their error, their size, and what exports make of them."""

from pathlib import Path

import keras
import numpy as np
import onnxruntime
import pytest

from tests.support.models import zoo
from tests.support.models.adapted import built, output
from tests.support.models.strategies import relative
from tests.support.repository.cases import mostly_rare
from tftpu import UserError
from tftpu.inference import quantizing
from tftpu.inference.exporting import export, serving

FAMILIES = ["resnet", "convnext", "efficientnetv2", "vit", "bert", "gpt", "llama"]
MOSTLY_RARE = mostly_rare(FAMILIES, ("convnext", "llama"))


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0.0, 0.05, shape).astype("float32")


@pytest.mark.parametrize("axis, shape", [(1, (96, 40)), (0, (40, 96)), (3, (3, 3, 16, 24))])
def test_eight_bits_are_off_by_half_a_step_of_their_channel(axis, shape):
    value = weight(*shape)
    value[tuple(slice(1) if n == axis else slice(None) for n in range(len(shape)))] *= 100.0
    found = quantizing.quantize_weight(value, axis, 8)
    others = tuple(n for n in range(len(shape)) if n != axis)
    step = np.abs(value).max(others, keepdims=True) / 127
    assert (np.abs(found.values - value) <= step / 2 * 1.0001).all()
    assert np.abs(found.codes).max() == 127
    assert found.bytes == value.size + 4 * shape[axis]


@pytest.mark.parametrize("axis, shape", [(1, (256, 40)), (3, (3, 3, 16, 24)), (1, (50, 8))])
def test_four_bits_are_packed_two_to_a_byte_with_a_scale_for_each_group(axis, shape):
    value = weight(*shape)
    found = quantizing.quantize_weight(value, axis, 4)
    assert found.codes.min() >= -8 and found.codes.max() <= 7
    packed = found.packed
    assert packed.nbytes == value.size // 2
    codes = np.stack([packed & 15, packed >> 4], 1).reshape(-1).astype(int) - 8
    assert np.array_equal(codes.reshape(found.codes.shape), found.codes)
    groups = {(256, 40): 4, (3, 3, 16, 24): 3, (50, 8): 1}[shape]  # of 64, 48 and 50 values
    assert found.scale.size == groups * shape[axis]
    # Of a normal distribution, 4 bits with the best scale keep all but about a tenth.
    assert 0.02 < relative(found.values, value) < 0.13


def test_the_scale_of_four_bits_has_the_least_error_of_those_tried():
    value = weight(64, 16)
    value[5, 3] = 0.2  # an outlier, which is clipped
    found = quantizing.quantize_weight(value, 1, 4)
    whole = np.abs(value).max(0) / 7
    plain = np.clip(np.rint(value / whole), -8, 7) * whole
    error, theirs = (np.square(w - value).sum(0) for w in (found.values, plain))
    assert (error <= theirs + 1e-9).all() and error.sum() < 0.95 * theirs.sum()
    assert found.scale.reshape(-1)[3] < whole[3]


@pytest.mark.parametrize("shape, bits", [((512, 8), 8), ((512, 8), 4)])
def test_channels_of_zeros_stay_zeros(shape, bits):
    found = quantizing.quantize_weight(np.zeros(shape, "float32"), 1, bits)
    assert not found.values.any() and np.isfinite(found.scale).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_count_are_quantized_and_tables_keep_eight_bits(family):
    model = built(family)
    found = quantizing.quantize_weights(model, 4)
    for variable in model.weights:
        counts = len(variable.shape) > 1 and np.prod(variable.shape) >= quantizing.SMALLEST
        assert (variable.path in found) == counts
    bits = {path: value.bits for path, value in found.items()}
    assert {b for path, b in bits.items() if "kernel" in path} <= {4}
    assert {b for path, b in bits.items() if "kernel" not in path} <= {8}


@pytest.mark.parametrize("family", ["vit", "bert", "resnet"])
def test_logits_with_eight_bits_are_within_two_percent(family):
    model = built(family)
    before = output(model, family)
    by_path = {v.path: v for v in model.weights}
    for path, value in quantizing.quantize_weights(model, 8).items():
        by_path[path].assign(value.values)
    after = output(model, family)
    assert 0 < relative(after, before) < 0.02


def served(family: str, bits: int) -> tuple[serving.Serving, np.ndarray]:
    """Returns what is exported, and the outputs of a model whose weights were rounded."""
    model, rounded = built(family), built(family)
    found = quantizing.quantize_weights(model, bits)
    by_path = {v.path: v for v in rounded.weights}
    for path, value in found.items():
        by_path[path].assign(value.values)
    x, _ = zoo.batch(family)
    dtype = "int32" if x.ndim == 2 else "float32"
    taken = serving.Input("x", x.shape[1:], dtype, below=20)
    return serving.Serving(model, [taken], lambda given: given, quantized=found), output(
        rounded, family
    )


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", MOSTLY_RARE)
def test_a_served_model_computes_with_the_rounded_weights(family, bits):
    found, expected = served(family, bits)
    x, _ = zoo.batch(family)
    assert relative(found.outputs({"x": x})["logits"], expected) < 1e-6
    own = {v.path for v in found.model.variables}
    assert len(found.module().held) == len(own - found.quantized.keys())


@pytest.mark.slow
@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("family", MOSTLY_RARE)
def test_onnx_runtime_computes_with_the_rounded_weights(family, bits, tmp_path):
    found, expected = served(family, bits)
    path = str(tmp_path / "model.onnx")
    exported = export.onnx(found, path, {})
    assert exported.difference < 1e-5
    x, _ = zoo.batch(family)
    session = onnxruntime.InferenceSession(path)
    assert relative(session.run(["logits"], {"x": x})[0], expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", MOSTLY_RARE)
def test_litert_holds_integers_and_computes_with_the_rounded_weights(family, tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    found, expected = served(family, 8)
    path = tmp_path / "model.tflite"
    assert export.litert(found, str(path), {}).difference < 1e-5
    x, _ = zoo.batch(family)
    run = Interpreter(str(path)).get_signature_runner("serving_default")
    assert relative(run(x=x)["logits"], expected) < 1e-5
    assert litert_bytes(path) < found.weight_bytes + 2000  # once, and constants


@pytest.mark.medium
def test_litert_holds_integers_of_heads_that_share_a_scale(tmp_path):
    x = keras.Input((16, 32), name="x")
    y = keras.layers.MultiHeadAttention(4, 8)(x, x)
    mask = np.triu(np.full((16, 16), -np.inf, "float32"), 1)
    model = keras.Model(x, keras.ops.max(y[:, None] + mask[:, :, None], -2))
    codes = quantizing.quantize_weights(model, 8)
    taken = serving.Input("x", (16, 32), "float32")
    found = serving.Serving(model, [taken], lambda given: given, quantized=codes)
    path = tmp_path / "model.tflite"
    assert export.litert(found, str(path), {}).difference < 1e-5
    assert len(codes) == 4 and litert_bytes(path) < found.weight_bytes + 3000


def litert_bytes(path: Path) -> int:
    """Returns the bytes of all weights and constants of a LiteRT model."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    return sum(len(buffer.data) for buffer in model.buffers if buffer.data is not None)


@pytest.mark.slow
@pytest.mark.parametrize("family, bits", [("convnext", 4), ("llama", 8)])
def test_a_saved_model_holds_integers(family, bits, tmp_path):
    found, _ = served(family, bits)
    exported = export.saved_model(found, str(tmp_path / "saved"))
    assert exported.difference < 1e-6
    stored = (tmp_path / "saved" / "variables" / "variables.data-00000-of-00001").stat().st_size
    assert found.weight_bytes <= stored < found.weight_bytes + 6000  # and the names of variables


@pytest.mark.slow
def test_an_export_that_computes_something_else_is_discarded(tmp_path, monkeypatch):
    found, _ = served("resnet", 8)
    right = found.function.get_concrete_function()
    wrong, _ = served("resnet", 4)
    monkeypatch.setattr(found, "function", wrong.function)
    monkeypatch.setattr(found, "module", wrong.module)
    monkeypatch.setattr(found, "outputs", lambda given: _named(right(**_tensors(given))))
    with pytest.raises(
        UserError, match="The export was discarded, because its output 'logits' differs"
    ):
        export.saved_model(found, str(tmp_path / "saved"))


def _tensors(given):
    import tensorflow as tf

    return {name: tf.constant(value) for name, value in given.items()}


def _named(outputs):
    return {name: value.numpy() for name, value in outputs.items()}


@pytest.mark.parametrize(
    "layer, shape, channels",
    [
        (keras.layers.Dense(1), (512,), (1,)),
        (keras.layers.DepthwiseConv2D(3, depth_multiplier=2), (8, 8, 64), (2, 3)),
        (keras.layers.DepthwiseConv2D(3), (8, 8, 64), (2, 3)),
        (keras.layers.Conv2DTranspose(24, 3), (8, 8, 16), (2,)),
    ],
)
def test_channels_of_very_different_sizes_have_scales_of_their_own(layer, shape, channels):
    model = keras.Sequential([keras.Input(shape), layer])
    kernel = next(v for v in layer.weights if "kernel" in v.name)
    others = tuple(n for n in range(len(kernel.shape)) if n not in channels)
    sizes = np.resize(
        [1.0, 1000.0, 0.03], [1 if n in others else s for n, s in enumerate(kernel.shape)]
    )
    value = weight(*kernel.shape) * sizes
    kernel.assign(value)
    for bits, most in (8, 0.01), (4, 0.16):
        found = quantizing.quantize_weights(model, bits)[kernel.path]
        off = np.sqrt(np.square(found.values - value).sum(others) / np.square(value).sum(others))
        assert off.max() < most and (found.bytes < value.size * 2)
