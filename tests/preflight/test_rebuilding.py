"""A compiled model is built again as it is, or refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu import preflight
from tftpu.errors import UserError
from tftpu.preflight import compiled_model
from tftpu.preflight.rebuilding import build_function


def build(loss: str = "sparse_categorical_crossentropy") -> keras.Model:
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4, name="logits")])
    model.compile(keras.optimizers.Adam(0.1, beta_1=0.8), loss, metrics=["accuracy"])
    return model


def test_the_model_is_built_again_with_its_optimizer_and_loss():
    model = build()
    again = build_function(model)
    first, second = again(), again()
    assert first is not second and first.optimizer is not second.optimizer
    assert first.optimizer.get_config() == model.optimizer.get_config()
    assert (first.loss, first.get_config()) == (model.loss, model.get_config())


def test_a_functional_model_is_built_again_as_often_as_it_is_needed():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    build = build_function(model)
    for _ in range(3):
        assert [v.shape for v in build().weights] == [v.shape for v in model.weights]


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


class Keeping(Plain):
    """A class that keeps its arguments, as many do, but does not describe itself."""

    def __init__(self, width, depth=1, rate=0.1, activation=keras.activations.relu, **kwargs):
        keras.Model.__init__(self, **kwargs)
        self.width, self.depth, self.rate, self.activation = width, depth, rate, activation
        inner = [keras.layers.Dense(width, activation) for _ in range(depth)]
        self.hidden = keras.Sequential([*inner, keras.layers.Dropout(rate)])
        self.logits = keras.layers.Dense(4)
        self.scale = lambda x: rate * x
        self.positions = keras.ops.arange(width)

    def call(self, x):
        return self.logits(self.scale(self.hidden(x)))


class WithWeight(Plain):
    def __init__(self, rows=3):
        super().__init__()
        self.rows = rows
        self.table = self.add_weight(shape=(rows, 4), name="table")

    def call(self, x):
        return super().call(x) + self.table[0]


class WithBranch(Plain):
    """A class whose argument is seen in the graph of a model in it alone."""

    def __init__(self, residual=False):
        keras.Model.__init__(self)
        self.residual = residual
        inputs = keras.Input((12,))
        hidden = keras.layers.Dense(12)(inputs)
        hidden = hidden + inputs if residual else hidden
        self.logits = keras.Model(inputs, keras.layers.Dense(4)(hidden))


class OwnBlock(keras.layers.Layer):
    """A layer that makes others when it is built."""

    def __init__(self, power):
        super().__init__()
        self.power = power

    def build(self, shape):
        self.inner = keras.layers.Dense(shape[-1])

    def call(self, x):
        return self.inner(x) ** self.power


class WithBlock(Plain):
    def __init__(self, power=2):
        super().__init__()
        self.power = power
        self.blocks = [OwnBlock(power), OwnBlock(1)]
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        x = x[:, None]
        return super().call(self.attention(x, x)[:, 0])


class WithInner(Plain):
    """A class with a model of another such class in it, which compiles itself."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.logits = Keeping(width)
        self.compile("sgd", "mse")


class Popping(Plain):
    def __init__(self, **kwargs):
        width = kwargs.pop("width", 4)
        keras.Model.__init__(self, **kwargs)
        self.logits = keras.layers.Dense(width)


class Doubling(Plain):
    def __init__(self, width=4):
        super().__init__()
        self.width = 2 * width


class Described(Sized):
    def __init__(self, width=4, **kwargs):
        super().__init__(width, **kwargs)
        self.width = width

    def get_config(self):
        return {"width": self.width}


class Headed(Plain):
    def __init__(self, base, width=4):
        super().__init__()
        self.base = base

    def call(self, x):
        return self.logits(self.base(x))


class Graph(keras.Model):
    def __init__(self, width=4):
        inputs = keras.Input((12,))
        super().__init__(inputs, keras.layers.Dense(width)(inputs))


class OwnTraining(keras.Model):
    """A functional model, which Keras describes by its graph."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Half(keras.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, shape):
        self.root = shape[-1] ** 0.5

    def call(self, x):
        return self.factor * x


class CompilesItself(Plain):
    """A class like KerasHub's tasks, of which Keras's `compile_from_config` only warns."""

    def __init__(self):
        super().__init__()
        self.compile("adam", "mse")

    def compile(self, *arguments, **named):
        super().compile(*arguments, **named)


class TwoOptimizers(Plain):
    def compile(self, d_optimizer, **named):
        super().compile(**named)
        self.d_optimizer = d_optimizer

    def train_step(self, data):
        raise NotImplementedError


class KeepsBoth(TwoOptimizers):
    def get_compile_config(self):
        return {"d_optimizer": self.d_optimizer, "loss": self.loss}

    def compile_from_config(self, config):
        self.compile(**config)


def own_loss(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


def make_loss(factor):
    def loss(y_true, y_pred):
        return factor * own_loss(y_true, y_pred)

    return loss


def with_layer(layer: keras.layers.Layer, kind: type = keras.Model) -> keras.Model:
    inputs = keras.Input((12,))
    return kind(inputs, layer(inputs))


def of_sequences(layer: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((5, 12))
    return keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))


def of_frozen_base() -> keras.Model:
    base = with_layer(keras.layers.Dense(6))
    base.trainable = False
    return keras.Sequential([base, keras.layers.Dense(4)])


def of_lambda() -> keras.Model:
    halved = keras.layers.Lambda(lambda x: x / 2)
    return keras.Sequential([keras.Input((12,)), halved, keras.layers.Dense(4)])


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        *(Plain, WithKeywords, lambda: Described(7), lambda: with_layer(Half(0.25)), of_lambda),
        *(lambda: Keeping(6, name="kept"), lambda: Keeping(5, depth=3, rate=0.5), WithWeight),
        *(WithBlock, lambda: WithBlock(3), lambda: WithInner(6), of_frozen_base),
        *(lambda: WithBranch(residual=True), lambda: Popping(name="popping")),
        lambda: with_layer(keras.layers.Dense(3), OwnTraining),
        lambda: of_sequences(keras.layers.Bidirectional(keras.layers.LSTM(3))),
    ],
)
def test_models_are_built_again_trained_or_not(make, trained):
    model = make()
    model.compile("adam", own_loss, metrics=["mae"])
    if trained:
        x = np.ones((4, *getattr(model, "input_shape", (None, 12))[1:]), "float32")
        model.fit(x, np.asarray(model(x)), verbose=0)
        model.predict(x, verbose=0)
    again = build_function(model)()
    assert (type(again), again.loss) == (type(model), own_loss)
    assert again.optimizer.get_config() == model.optimizer.get_config()
    if trained:
        again(x)
        assert [v.shape for v in again.weights] == [v.shape for v in model.weights]


@pytest.mark.parametrize(
    "make",
    [Sized, lambda: Graph(8), lambda: with_layer(Sized(8)), lambda: Headed(Plain(), 3)],
)
def test_a_class_whose_arguments_nothing_keeps_is_refused(make):
    """Its config has the defaults in their place: a smaller model would be priced."""
    model = make()
    model.compile("sgd", "mse")
    said = r"Keras loses arguments of \w+\(\): [\w, ]+, unless get_config\(\) returns"
    with pytest.raises(UserError, match=rf"{said} them(, or the class .*)?\. Give a function"):
        build_function(model)


def change(model, **attributes):
    for path, value in attributes.items():
        *inner, last = path.split("__")
        owner = model
        for name in inner:
            owner = getattr(owner, name)
        setattr(owner, last, value)
    return model


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Popping(width=64), r"Popping\(\) makes another model: logits differs"),
        (lambda: Doubling(8), r"Doubling\(width=16\) makes another model: width differs"),
        (lambda: change(Plain(), logits__activation=keras.activations.tanh), "logits differs"),
        (lambda: change(Keeping(4), scale=lambda x: x), "scale differs"),
        (lambda: change(Keeping(4), scale=Keeping(4, rate=0.5).scale), "scale differs"),
        (lambda: change(Keeping(4), rate=0.9), "makes another model: hidden.* differs"),
        (lambda: change(Plain(), trainable=False), "it differs"),
        (lambda: change(WithWeight(), table__trainable=False), "table differs"),
        (lambda: change(WithBlock(3), power=4), r"power=4\) makes another.*: blocks\[0\]\.power"),
    ],
)
def test_a_class_that_makes_another_model_now_is_refused(make, said, called):
    model = make()
    if called:
        model(np.ones((2, 12), "float32"))
    model.compile("sgd", "mse")
    with pytest.raises(UserError, match=said):
        build_function(model)


def test_what_was_frozen_or_adapted_in_a_class_is_refused():
    for alter in (lambda m: m.enable_lora(2), lambda m: change(m, kernel__trainable=False)):
        model = Plain()
        model(np.ones((2, 12), "float32"))
        alter(model.logits)
        model.compile("sgd", "mse")
        with pytest.raises(UserError, match=r"logits differs|a copy trains what is frozen"):
            build_function(model)


def test_what_the_model_was_compiled_with_is_kept_whatever_its_constructor_compiles():
    model = CompilesItself()
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), own_loss)
    again = build_function(model)()
    assert again.optimizer.get_config() == model.optimizer.get_config()
    assert again.loss is own_loss


def test_a_class_with_a_compile_of_its_own():
    model = TwoOptimizers()
    model.compile("sgd", loss="mse")
    with pytest.raises(UserError, match=r"TwoOptimizers\.compile\(\): d_optimizer\."):
        build_function(model)
    model = KeepsBoth()
    model.compile("sgd", loss="mse")
    assert build_function(model)().d_optimizer == "sgd"


def test_losses_of_one_name_are_not_taken_for_one_another():
    inputs = keras.Input((12,))
    a, b = (keras.layers.Dense(1, name=name)(inputs) for name in "ab")
    model = keras.Model(inputs, {"a": a, "b": b})
    model.compile("sgd", {"a": make_loss(1.0), "b": make_loss(100.0)})
    with pytest.raises(UserError, match="Could not locate function 'loss'"):
        build_function(model)


def test_frozen_layers_and_other_dtypes_are_seen():
    frozen = build()
    frozen.layers[0].kernel.trainable = False
    with pytest.raises(UserError, match="a copy has other weights, or trains others"):
        build_function(frozen)
    for alter in (lambda m: setattr(m.logits, "trainable", False), set_bfloat16):
        model = Plain()
        alter(model)
        model.compile("sgd", "mse")
        with pytest.raises(UserError, match=r"makes another model: .*logits differs"):
            build_function(model)


def set_bfloat16(model):
    model.logits = keras.layers.Dense(4, dtype="bfloat16")


def test_the_precision_of_a_class_that_was_not_called_is_that_of_its_layers():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = Plain()
    model.compile("sgd", "mse")
    keras.config.set_dtype_policy("float32")
    assert compiled_model.read_precision(model) == "mixed_bfloat16"
    build_function(model)
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.slow
def test_a_class_of_your_own_is_checked_as_its_function_is():
    def build_plain():
        model = Plain()
        model.compile("adam", own_loss)
        return model

    batch = tf.TensorSpec((64, 12)), tf.TensorSpec((64, 4))
    [ours] = preflight.check(build_plain(), batch, ["v5e-8"]).slices
    [expected] = preflight.check(build_plain, batch, ["v5e-8"]).slices
    assert ours.compiles and ours.step_ms == expected.step_ms
