"""Steps of several objectives, and the same written by hand with Keras's optimizers.

    KERAS_BACKEND=jax python -m tests.support.programs.own_code.objective_updates

prints, by case, the largest difference between the weights of both. Two devices share the batches.
"""

import json

import keras
import numpy as np
from keras import ops

import tftpu

CASES = {
    "in turn": {},
    "simultaneous": {"simultaneous": True},
    "without regularizers": {"regularize": False},
    "one optimizer": {"shared": True},
    "one optimizer, simultaneous": {"shared": True, "simultaneous": True, "regularize": False},
}


class Halves(keras.Model):
    """Two layers, each of which follows a loss of its own."""

    def __init__(self):
        super().__init__()
        weights = {
            "kernel_initializer": "ones",
            "kernel_regularizer": keras.regularizers.L2(0.5),
        }
        self.first = keras.layers.Dense(3, **weights)
        self.second = keras.layers.Dense(6, **weights)

    def call(self, x):
        return self.second(self.first(x))


def build_optimizer():
    """Returns an optimizer whose updates depend on how many it has made."""
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.7))


def rebuild_loss(model, batch, training):
    return ops.mean((model(batch) - batch) ** 2, -1)


def size_loss(model, batch, training):
    return ops.mean(ops.square(model(batch) - 1.0), -1)


def differentiate(model, loss_fn, batch, variables, regularize):
    """Returns the gradients of the mean of a loss."""

    def compute_loss():
        loss = ops.mean(loss_fn(model, batch, True))
        return loss + sum(model.losses) if regularize else loss

    if keras.backend.backend() == "jax":
        import jax

        def compute_for(values):
            known = {id(v): (v, v.value) for v in model.variables}
            known |= {id(v): (v, value) for v, value in zip(variables, values)}
            with keras.StatelessScope([*known.values()]):
                return compute_loss()

        return jax.grad(compute_for)([v.value for v in variables])
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = compute_loss()
    return tape.gradient(loss, [v.value for v in variables])


def train_by_hand(batches, shared=False, simultaneous=False, regularize=True):
    model = Halves()
    model(batches[0])
    parts = (
        (rebuild_loss, model.first.trainable_variables),
        (size_loss, model.second.trainable_variables),
    )
    one = build_optimizer()
    optimizers = [one, one] if shared else [one, build_optimizer()]
    for optimizer, (_, variables) in zip(optimizers, parts):
        optimizer.build(model.trainable_variables if shared else variables)
    for batch in batches:
        begun = [differentiate(model, fn, batch, own, regularize) for fn, own in parts]
        for number, (fn, own) in enumerate(parts):
            grads = begun[number]
            if not simultaneous:
                grads = differentiate(model, fn, batch, own, regularize)
            optimizers[number].apply(grads, own)
    return model.get_weights()


def train(engine, x, batch_size, shared=False, **options):
    with engine.scope():
        model = Halves()  # its layers are not built yet
        one = build_optimizer()
        other = one if shared else build_optimizer()
    objectives = [
        tftpu.Objective(rebuild_loss, [model.first], one, **options),
        tftpu.Objective(size_loss, [model.second], other, **options),
    ]
    tftpu.Trainer(model, objectives=objectives).fit(
        x, batch_size=batch_size, shuffle=False, verbose=0
    )
    return model.get_weights()


def main() -> None:
    engine = tftpu.connect("none", 2, engine=keras.backend.backend())
    x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    found = {}
    by_hand = {name: train_by_hand(np.split(x, 4), **case) for name, case in CASES.items()}
    for name, case in CASES.items():
        weights = train(engine, x, 16, **case)
        found[name] = max(float(np.abs(a - b).max()) for a, b in zip(weights, by_hand[name]))
    # The cases are different: each as computed by hand, against the first.
    first, *others = by_hand.values()
    apart = [max(np.abs(a - b).max() for a, b in zip(first, other)) for other in others]
    print(json.dumps({"found": found, "least apart": float(min(apart))}))


if __name__ == "__main__":
    main()
