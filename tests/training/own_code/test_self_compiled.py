"""Models that compile themselves train by a loss function, if that is not given two losses."""

import keras
import numpy as np
import pytest
from keras import ops

import tftpu
from tftpu.errors import UserError


class AsKerasHub(keras.Model):
    """A model that compiles itself with a loss, as the tasks of KerasHub do when they are built."""

    def __init__(self, filled_in: str):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.filled_in = filled_in
        self.compile("sgd", **{filled_in: "mse"} if filled_in == "loss" else {})

    def call(self, x):
        return self.dense(x)


class LossFilledIn(AsKerasHub):
    def compile(self, optimizer="auto", loss="auto", *, metrics="auto", **others):
        loss = "mse" if loss == "auto" else loss
        super().compile(optimizer, loss, metrics=["mae"] if metrics == "auto" else metrics)


class LossOfABox(AsKerasHub):
    def compile(self, optimizer="auto", box_loss="auto", metrics=None, **others):
        super().compile(optimizer, "mse" if box_loss == "auto" else box_loss, metrics=metrics)


@pytest.mark.medium
@pytest.mark.parametrize(
    "make", [AsKerasHub, LossFilledIn, LossOfABox], ids=["kept", "filled in", "of a box"]
)
def test_a_model_that_compiles_itself_trains_by_a_loss_function(make):
    keras.utils.set_random_seed(0)
    model = make("loss" if make is AsKerasHub else "")
    model.compile(optimizer="sgd")
    x, y = np.ones((8, 2), "float32"), np.full((8, 1), 3.0, "float32")
    seen = model(x).numpy()

    def loss_fn(model, batch, training):
        return 5.0 * ops.abs(batch[1] - model(batch[0], training=training))[:, 0]

    history = tftpu.Trainer(model, None, loss_fn=loss_fn).fit(x, y, batch_size=8, epochs=1)
    assert history.history["loss"] == pytest.approx([5.0 * np.abs(y - seen).mean()])


def test_a_loss_that_the_last_compile_was_given_is_still_refused():
    model = AsKerasHub("loss")
    model.compile(optimizer="sgd", loss="mae")
    with pytest.raises(UserError, match="was compiled with a loss"):
        tftpu.Trainer(model, None, loss_fn=lambda model, batch, training: model(batch[0])[:, 0])


def test_a_functional_model_whose_first_loss_was_never_built_trains_by_a_loss_function():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    model.compile("sgd")
    x, y = np.ones((8, 2), "float32"), np.full((8, 1), 3.0, "float32")
    seen = model(x).numpy()

    def loss_fn(model, batch, training):
        return ops.abs(batch[1] - model(batch[0], training=training))[:, 0]

    history = tftpu.Trainer(model, loss_fn=loss_fn).fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert history.history["loss"] == pytest.approx([np.abs(y - seen).mean()])
