"""A compiled model is checked as a function that builds the same model is."""

import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu import preflight
from tftpu.errors import UserError
from tftpu.preflight import compiled_model
from tftpu.preflight.options import PreflightOptions


def build(loss: str = "sparse_categorical_crossentropy") -> keras.Model:
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4, name="logits")])
    model.compile(keras.optimizers.Adam(0.1, beta_1=0.8), loss, metrics=["accuracy"])
    return model


def build_of_two() -> keras.Model:
    given = {"a": keras.Input((3, 2)), "b": keras.Input((), dtype="int32")}
    both = keras.layers.Concatenate()(
        [keras.layers.Flatten()(given["a"]), keras.layers.Embedding(5, 2)(given["b"])]
    )
    model = keras.Model(given, keras.layers.Dense(1)(both))
    model.compile("sgd", keras.losses.MeanSquaredError())
    return model


def test_the_number_of_examples_and_the_model_tell_the_batch():
    x, y = compiled_model.read_batch_spec(64, build)
    assert (x, y) == (tf.TensorSpec((64, 12)), tf.TensorSpec((64,), tf.int32))
    _, y = compiled_model.read_batch_spec(64, lambda: build("categorical_crossentropy"))
    assert y == tf.TensorSpec((64, 4))
    x, y = compiled_model.read_batch_spec(8, build_of_two)
    assert x == {"a": tf.TensorSpec((8, 3, 2)), "b": tf.TensorSpec((8,), tf.int32)}
    assert y == tf.TensorSpec((8, 1))
    uncompiled = keras.Sequential([keras.layers.Dense(4)])
    with pytest.raises(UserError, match=r"is not compiled: call model\.compile"):
        compiled_model.read_batch_spec(64, lambda: uncompiled)
    uncompiled.compile("sgd", "mse")
    with pytest.raises(UserError, match=r"symbolic inputs .* give a batch, \(x\[:64\], y"):
        compiled_model.read_batch_spec(64, lambda: uncompiled)


def test_arrays_give_their_shapes():
    batch = np.zeros((6, 12), "float32"), np.zeros(6, "int64")
    expected = tf.TensorSpec((6, 12)), tf.TensorSpec((6,), tf.int64)
    assert compiled_model.read_batch_spec(batch, build) == expected


def test_the_precision_is_that_of_the_layers():
    assert compiled_model.find_policy(build()) == "float32"
    other = PreflightOptions(precision="auto")  # bfloat16 on a TPU
    with pytest.raises(UserError, match=r"precision='auto': the layers of .* are float32\. Build"):
        preflight.check(build(), 64, ["v5e-8"], other)
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert compiled_model.find_policy(build()) == "mixed_bfloat16"


def test_the_heading_names_the_dtypes_of_weights_and_of_the_computation():
    keras.config.set_dtype_policy("bfloat16")
    assert compiled_model.read_precision(build()) == "bfloat16"
    title = preflight.Report(64, "bfloat16", None, []).title()
    assert title == "Preflight: global batch 64, bfloat16"
    title = preflight.Report(64, "mixed_bfloat16", None, []).title()
    assert title.endswith("mixed_bfloat16 (weights float32, computed in bfloat16)")


@pytest.mark.parametrize(
    ("loss", "batch", "message"),
    [
        (None, ((8, 12), (8, 4)), r"one-hot, but the loss takes class numbers: give np.argmax"),
        ("categorical_crossentropy", ((8, 12), (8,)), r"class numbers, but .*\.one_hot\(y, 4\)"),
        (None, ((8, 10), (8,)), r"have the shape \[10\], but the model takes \[12\]"),
    ],
)
def test_a_batch_that_the_model_cannot_take(loss, batch, message):
    model = build(loss) if loss else build()
    with pytest.raises(UserError, match=message):
        preflight.check(model, tuple(map(np.zeros, batch)), ["v5e-8"])


def test_the_traceback_of_a_mistake_has_the_line_of_the_caller_and_the_function_alone():
    with pytest.raises(UserError, match="There is no v5e-9") as caught:
        preflight.check(build(), 64, ["v5e-9"])
    frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert len(frames) == 2 and frames[1] == "check"


class Unknown(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x)


def test_a_model_that_no_config_describes_needs_a_function():
    model = Unknown(keras.layers.Dense(1))
    with pytest.raises(UserError, match="is not compiled"):
        preflight.check(model, (np.zeros((8, 2)), np.zeros((8, 1))), ["v5e-8"])
    model.compile("sgd", "mse")
    for batch in (np.zeros((8, 2)), np.zeros((8, 1))), 8:  # a number is no other mistake
        with pytest.raises(
            UserError, match=r"class Unknown cannot be .* Give a function"
        ) as caught:
            preflight.check(model, batch, ["v5e-8"])
        assert len(str(caught.value)) < 500 and caught.value.__cause__ is None


def test_a_number_of_examples_needs_symbolic_inputs():
    def build_unknown():
        model = Unknown(keras.layers.Dense(1))
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UserError, match="only of a model with symbolic inputs"):
        preflight.check(build_unknown, 8, ["v5e-8"])


@pytest.mark.slow
def test_the_report_is_that_of_a_function():
    [ours] = preflight.check(build(), 64, slices=["v5e-8"]).slices
    batch = tf.TensorSpec((64, 12)), tf.TensorSpec((64,), tf.int32)
    options = PreflightOptions(precision="float32")
    [expected] = preflight.check(build, batch, ["v5e-8"], options).slices
    assert ours.compiles and ours.step_ms == expected.step_ms
    assert ours.hbm_bytes == expected.hbm_bytes
