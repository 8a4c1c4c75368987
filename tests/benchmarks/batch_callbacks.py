"""Times `Trainer.fit` and Keras's own `fit`, both with a callback that reads each batch's logs.

    KERAS_BACKEND=tensorflow python -m tests.benchmarks.batch_callbacks [turns]
    KERAS_BACKEND=jax python -m tests.benchmarks.batch_callbacks [turns]

Both train the same small convolutional network on one CPU device, an epoch each in turn, so that
other load on the machine affects them alike. The first epochs, which compile, are left out.
"""

import statistics
import sys
import time

import keras
import numpy as np

import tftpu

BAR = 1.1
STEPS = 100


class Reads(keras.callbacks.Callback):
    """Reads the logs of each batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.last = logs["loss"]


def build_model() -> keras.Model:
    """Returns a compiled network for images of 16 x 16 pixels."""
    layers = [keras.Input((16, 16, 3)), keras.layers.Conv2D(32, 3, activation="relu")]
    layers += [keras.layers.Conv2D(32, 3, strides=2, activation="relu"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def main(turns: int) -> None:
    """Prints the medians of both, and the median of their ratios."""
    engine = tftpu.connect("none")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64 * STEPS, 16, 16, 3)).astype("float32")
    y = rng.integers(0, 10, len(x))
    with engine.scope():
        trainer, theirs = tftpu.Trainer(build_model()), build_model()
    times: dict[str, list[float]] = {"trainer": [], "keras fit": []}
    for turn in range(turns + 1):
        both = [("trainer", trainer.fit), ("keras fit", theirs.fit)]
        for name, fit in both[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            fit(x, y, batch_size=64, epochs=1, callbacks=[Reads()], verbose=0)
            if turn:
                times[name].append((time.perf_counter() - began) / STEPS * 1e3)
    for name, found in times.items():
        print(f"{name:10}{statistics.median(found):9.3f} ms a step")
    ratio = statistics.median(a / b for a, b in zip(*times.values()))
    print(
        f"trainer / keras fit on {keras.config.backend()}, {turns} turns of {STEPS} steps: "
        f"{ratio:.3f}; the bar is {BAR}: {ratio <= BAR}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
