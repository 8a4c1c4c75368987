"""Steps of a model's own that use variables outside of their state, on the JAX engine.

    KERAS_BACKEND=jax python -m tests.support.programs.own_code.outside

prints, by case, the error of a run of three epochs, "" if there is none.
"""

import json

import jax
import keras
import numpy as np

import tftpu


class Own(keras.Model):
    """Uses the variable `outside` in the way of a case."""

    def __init__(self, case: str, outside: keras.Variable):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self._case, self._outside = case, [lambda: outside]

    def call(self, x, training=False):
        if self._case == "assigned in call":
            self._outside[0]().assign(1.0)
        return self.layer(x)

    def differentiate_by(self, trainable, untrained, x, y):
        y_pred, untrained = self.stateless_call(trainable, untrained, x, training=True)
        return keras.ops.mean((y_pred - y) ** 2), untrained

    def train_step(self, state, data):
        trainable, untrained, slots, states = state
        differentiate = jax.value_and_grad(self.differentiate_by, has_aux=True)
        (loss, untrained), gradients = differentiate(trainable, untrained, *data)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        if self._case.startswith("read"):
            loss = loss + self._outside[0]()
        if self._case == "the model's own":
            loss = loss + keras.ops.sum(self.layer.kernel)
        if self._case == "assigned":
            self._outside[0]().assign(loss)
        new = (trainable, untrained, slots, states)
        if self._case == "tuples":
            new = tuple(map(tuple, new))
        return {"own": loss}, new[:3] if self._case == "too few" else new

    def test_step(self, state, data):
        x, _ = data
        y_pred, untrained = self.stateless_call(*state[:2], x, training=False)
        factor = self._outside[0]() if self._case == "read in a test" else 1.0
        return {"own": keras.ops.mean(y_pred) * factor}, (state[0], untrained, state[2])


class Changes(keras.callbacks.Callback):
    """Changes a variable after every epoch."""

    def __init__(self, variable: keras.Variable):
        super().__init__()
        self._variable = variable

    def on_epoch_end(self, epoch, logs=None):
        self._variable.assign(self._variable + 1.0)


def main() -> None:
    engine = tftpu.connect("none", 2, engine="jax")
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    data = {"x": x, "y": x[:, :1], "validation_data": (x, x[:, :1])}
    found = {}
    cases = ("none", "tuples", "read and changed", "read in a test", "the model's own")
    for case in (*cases, "assigned", "assigned in call", "too few"):
        with engine.scope():
            outside = keras.Variable(1.0, name="outside")
            model = Own(case, outside)
            model.compile(keras.optimizers.Adam(0.01), "mse")
        callbacks = [Changes(outside)] if case.startswith("read") else []
        try:
            tftpu.Trainer(model).fit(**data, epochs=3, callbacks=callbacks, verbose=0)
            found[case] = ""
        except tftpu.UserError as error:
            found[case] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
