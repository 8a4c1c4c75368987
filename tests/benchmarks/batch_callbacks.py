"""Times `Trainer.fit` and Keras's own `fit`, both with a callback that reads each batch's logs.

    KERAS_BACKEND=tensorflow python -m tests.benchmarks.batch_callbacks [turns]
    KERAS_BACKEND=jax python -m tests.benchmarks.batch_callbacks [turns]

Both train the same network on the same batches, `digits_resnet`, and take turns, so that other load
on the machine affects them alike; medians over the turns are printed.
"""

import statistics
import sys

import keras
import tensorflow as tf

import tftpu
from tftpu import input_pipelines
from tftpu.launch import benchmark as bench
from tftpu.launch.run import experiment as build
from tftpu.launch.settings import config_flags

BAR = 1.1


class Reads(keras.callbacks.Callback):
    """Reads the logs of each batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.last = logs["loss"]


def main(turns: int) -> None:
    """Prints the medians of both, and the median of their ratios."""
    bench.TURNS = turns
    words = ["--config.train.checkpoint_every=0", "--config.train.steps_per_loop=1"]
    experiment = config_flags.load("digits_resnet", words)
    experiment.train.best_metric = ""  # the benchmark evaluates nothing
    engine = tftpu.connect("none", 1)

    def train(turn: bench.ContestantThread) -> None:
        with engine.scope():
            trainer = build.build_trainer(experiment, None)
        callbacks = [Reads(), bench.TurnCallback(turn)]
        data = build.build_training_data(experiment)
        trainer.fit(data, steps=bench.FOREVER, callbacks=callbacks, verbose=0)

    def train_by_keras(turn: bench.ContestantThread) -> None:
        with engine.scope():
            model = build.build_model(experiment)
        callbacks = [Reads(), bench.TurnCallback(turn)]
        data = input_pipelines.starting_at(build.build_training_data(experiment), 0)
        data = data.prefetch(tf.data.AUTOTUNE)
        model.fit(data, steps_per_epoch=bench.FOREVER, callbacks=callbacks, verbose=0)

    steps = experiment.train.log_every
    times = bench.take_turns({"trainer": train, "keras fit": train_by_keras}, steps)
    for name, found in times.items():
        print(f"{name:10}{statistics.median(found) / steps * 1e3:9.3f} ms a step")
    ratio = statistics.median(a / b for a, b in zip(*times.values()))
    print(
        f"trainer / keras fit on {keras.config.backend()}, {turns} turns of {steps} steps: "
        f"{ratio:.3f}; the bar is {BAR}: {ratio <= BAR}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
