"""Layers and activations of Keras give the same numbers in ONNX Runtime."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import activations, layers

from tftpu.errors import UserError
from tftpu.inference.exporting import onnx_model
from tftpu.inference.exporting.serving import Serving, build_inputs

ROWS = tf.TensorSpec((8, 12), tf.int32)  # of language models, and of no use here
ROW, IMAGE, TIME = (8,), (8, 8, 4), (6, 4)
ACTIVATIONS = sorted(
    name
    for name, function in vars(activations).items()
    if callable(function) and name not in ("deserialize", "get", "serialize", "threshold")
)
LAYERS = {
    "Normalization": (
        ROW,
        lambda: layers.Normalization(mean=np.arange(8.0), variance=np.full(8, 2.0)),
    ),
    "of channels": (IMAGE, lambda: layers.Normalization(mean=[1, 2, 3, 4], variance=[1, 4, 9, 1])),
    "inverted": (ROW, lambda: layers.Normalization(mean=1.0, variance=4.0, invert=True)),
    "Discretization": (ROW, lambda: layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.5])),
    "one hot": (ROW, lambda: layers.Discretization([-1.0, 1.0], output_mode="one_hot")),
    "grouped": (IMAGE, lambda: layers.Conv2D(4, 3, groups=2)),
    "grouped in one dimension": (TIME, lambda: layers.Conv1D(4, 3, groups=2)),
    "exact gelu": (ROW, lambda: layers.Dense(3, activation="gelu")),
    "LSTM": (TIME, lambda: layers.LSTM(3)),
    "GRU": (TIME, lambda: layers.GRU(3, return_sequences=True)),
    "log1p": (ROW, lambda: layers.Lambda(lambda x: keras.ops.log1p(keras.ops.square(x)))),
    "SpectralNormalization": (ROW, lambda: layers.SpectralNormalization(layers.Dense(3))),
    "GroupNormalization": (IMAGE, lambda: layers.GroupNormalization(2)),
    "UpSampling2D": (IMAGE, lambda: layers.UpSampling2D(2, interpolation="bilinear")),
    "SeparableConv1D": (TIME, lambda: layers.SeparableConv1D(3, 3)),
    "Conv2DTranspose": (IMAGE, lambda: layers.Conv2DTranspose(3, 3, strides=2, padding="same")),
}


def served(shape, layer) -> Serving:
    x = keras.Input(shape, name="x")
    keras.utils.set_random_seed(0)
    model = keras.Model(x, layer(x))
    return Serving(model, *build_inputs(model, ROWS, None))


def difference(shape, layer, path) -> float:
    """Returns how far ONNX Runtime's output is from Keras's, over the largest of these."""
    import onnxruntime

    serving = served(shape, layer)
    onnx_model.write(serving, path, {})
    session = onnxruntime.InferenceSession(str(path))
    assert [value.name for value in session.get_inputs()] == ["x"]
    worst, rng = 0.0, np.random.default_rng(1)
    for examples in (4, 1):
        x = rng.normal(0, 3, (examples, *shape)).astype("float32")
        x[0].flat[:4] = (0.0, -1.0, 1.0, 1.5)  # what is a bound of something
        expected = np.asarray(serving.model(x))
        (found,) = session.run(None, {"x": x})
        assert found.shape == expected.shape
        largest = max(np.abs(expected).max(), 1e-9)
        worst = max(worst, np.abs(found.astype("float64") - expected).max() / largest)
    return worst


@pytest.mark.medium
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_the_same_numbers(name, tmp_path):
    shape, make = LAYERS[name]
    assert difference(shape, make(), tmp_path / "m.onnx") < 1e-5


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_gives_the_same_numbers(name, tmp_path):
    layer = layers.Activation(getattr(activations, name))
    assert difference(ROW, layer, tmp_path / "m.onnx") < 1e-5


def test_exact_gelu_is_the_error_function_of_mathematics(tmp_path):
    import onnxruntime

    path = tmp_path / "m.onnx"
    onnx_model.write(served((1,), layers.Activation(activations.gelu)), path, {})
    x = np.linspace(-6, 6, 101, dtype="float32")[:, None]
    expected = [[v / 2 * math.erfc(-v / math.sqrt(2))] for v in x[:, 0].astype("float64")]
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_lookup_is_named(tmp_path):
    x = keras.Input((2,), dtype="int64", name="x")
    model = keras.Model(x, layers.IntegerLookup(vocabulary=[1, 2])(x))
    serving = Serving(model, *build_inputs(model, ROWS, None))
    with pytest.raises(UserError, match=r"a lookup in a table, as in IntegerLookup.*saved_model"):
        onnx_model.write(serving, tmp_path / "m.onnx", {})
