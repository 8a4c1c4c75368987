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


def test_the_model_is_built_again_with_its_optimizer_and_loss():
    model = build()
    again = compiled_model.build_function(model)
    first, second = again(), again()
    assert first is not second and first.optimizer is not second.optimizer
    assert first.optimizer.get_config() == model.optimizer.get_config()
    assert (first.loss, first.get_config()) == (model.loss, model.get_config())


def test_a_functional_model_is_built_again_as_often_as_it_is_needed():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    build = compiled_model.build_function(model)
    for _ in range(3):
        assert [v.shape for v in build().weights] == [v.shape for v in model.weights]


def test_the_precision_is_that_of_the_layers():
    auto = PreflightOptions()
    assert compiled_model.choose_precision(build(), auto).precision == "float32"
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert compiled_model.choose_precision(build(), auto).precision == "mixed_bfloat16"


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
            UserError, match=r"class Unknown cannot be .* give a function"
        ) as caught:
            preflight.check(model, batch, ["v5e-8"])
        assert len(str(caught.value)) < 500 and caught.value.__cause__ is None


class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.logits = keras.layers.Dense(4)

    def call(self, x):
        return self.logits(x)


class WithKeywords(Plain):
    def __init__(self, **kwargs):
        keras.Model.__init__(self, **kwargs)
        self.logits = keras.layers.Dense(4)


class Sized(Plain):
    def __init__(self, width=4, **kwargs):
        keras.Model.__init__(self, **kwargs)
        self.logits = keras.layers.Dense(width)


class Described(Sized):
    def __init__(self, width=4, **kwargs):
        super().__init__(width, **kwargs)
        self.width = width

    def get_config(self):
        return {"width": self.width}


class Several(Plain):
    def __init__(self, widths=(8, 4), rate=None):
        keras.Model.__init__(self)
        self.widths, self.rate = widths, rate
        self.steps = [keras.layers.Dense(width) for width in widths]

    def call(self, x):
        for step in self.steps:
            x = step(x)
        return x


class Graph(keras.Model):
    def __init__(self, width=4):
        inputs = keras.Input((12,))
        super().__init__(inputs, keras.layers.Dense(width)(inputs))


class Half(keras.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return self.factor * x


def own_loss(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


def with_layer(layer: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((12,))
    return keras.Model(inputs, layer(inputs))


@pytest.mark.parametrize(
    "make",
    [
        *(Plain, WithKeywords, Sized, Graph, lambda: Described(7)),
        *(lambda: with_layer(Half(0.25)), lambda: with_layer(Sized()), Several),
    ],
)
def test_classes_and_losses_of_your_own_are_built_again(make):
    model = make()
    model.compile("adam", own_loss, metrics=["mae"])
    again = compiled_model.build_function(model)()
    assert (type(again), again.loss) == (type(model), own_loss)
    x = np.ones((2, 12), "float32")
    shapes = [[v.shape for v in one.weights] for one in (again, model) if one(x) is not None]
    assert shapes[0] == shapes[1]
    if isinstance(model.layers[-1], Half):
        assert again.layers[-1].factor == 0.25


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: Sized(8), lambda: Graph(8), lambda: with_layer(Sized(8))),
        lambda: Several((8, 5)),
    ],
)
def test_a_class_whose_arguments_keras_does_not_keep_is_refused(make):
    """Its config has the defaults in their place: a smaller model would be priced."""
    model = make()
    model.compile("sgd", "mse")
    units, widths = r"units of Dense is 8, but 4", r"widths of Several is \(8, 5\), but \(8, 4\)"
    said = rf"({units}|{widths}) in the copy\. Return what .* or give a function"
    with pytest.raises(UserError, match=said):
        compiled_model.build_function(model)


class Forgetful(Described):
    def __init__(self, width=4, rate=0.1, **kwargs):
        super().__init__(width, **kwargs)
        self.rate = rate


def test_a_config_without_a_setting_is_refused():
    model = Forgetful(8, rate=0.5)
    model.compile("sgd", "mse")
    with pytest.raises(UserError, match=r"rate of Forgetful is 0\.5, but 0\.1 in the copy\."):
        compiled_model.build_function(model)


class CompilesItself(Plain):
    """As KerasHub's tasks; Keras's `compile_from_config` only warns of such a class."""

    def __init__(self):
        super().__init__()
        self.compile("adam", "mse")

    def compile(self, *arguments, **named):
        super().compile(*arguments, **named)


class TwoOptimizers(Plain):
    def compile(self, d_optimizer, **named):
        super().compile(**named)
        self.d_optimizer = d_optimizer


def test_what_the_model_was_compiled_with_is_kept_whatever_its_constructor_compiles():
    model = CompilesItself()
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), own_loss)
    again = compiled_model.build_function(model)()
    assert again.optimizer.get_config() == model.optimizer.get_config()
    assert again.loss is own_loss


def test_a_class_with_a_compile_of_its_own_that_keeps_more_is_refused():
    model = TwoOptimizers()
    model.compile("sgd", loss="mse")
    with pytest.raises(UserError, match=r"d_optimizer of TwoOptimizers is 'sgd', but None"):
        compiled_model.build_function(model)


def test_the_precision_of_a_class_that_was_not_called_is_that_of_its_layers():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = Plain()
    keras.config.set_dtype_policy("float32")
    assert compiled_model.read_precision(model) == "mixed_bfloat16"


def test_a_number_of_examples_needs_symbolic_inputs():
    def build_unknown():
        model = Unknown(keras.layers.Dense(1))
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UserError, match="only of a model with symbolic inputs"):
        preflight.check(build_unknown, 8, ["v5e-8"])


@pytest.mark.slow
def test_a_class_of_your_own_is_checked_as_its_function_is():
    def build_plain():
        model = Plain()
        model.compile("adam", own_loss)
        return model

    batch = tf.TensorSpec((64, 12)), tf.TensorSpec((64, 4))
    options = PreflightOptions(precision="float32")
    [ours] = preflight.check(build_plain(), batch, ["v5e-8"]).slices
    [expected] = preflight.check(build_plain, batch, ["v5e-8"], options).slices
    assert ours.compiles and ours.step_ms == expected.step_ms


@pytest.mark.slow
def test_the_report_is_that_of_a_function():
    [ours] = preflight.check(build(), 64, slices=["v5e-8"]).slices
    batch = tf.TensorSpec((64, 12)), tf.TensorSpec((64,), tf.int32)
    options = PreflightOptions(precision="float32")
    [expected] = preflight.check(build, batch, ["v5e-8"], options).slices
    assert ours.compiles and ours.step_ms == expected.step_ms
    assert ours.hbm_bytes == expected.hbm_bytes
