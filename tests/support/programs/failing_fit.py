"""A fit that an error ends, whose data are read ahead by Python code in other threads.

Its arguments are the number of devices and where it fails: in "training" or in "evaluation".
"""

import sys
import time
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import tftpu


def read_slowly() -> Iterator[np.ndarray]:
    """Yields examples without end, each after a while."""
    while True:
        time.sleep(0.01)
        yield np.ones(3, np.float32)


def fail(batch: int, logs: dict) -> None:
    """Raises what ends the fit."""
    raise RuntimeError("the end")


def main(devices: int, place: str) -> None:
    """Fits until it fails."""
    engine = tftpu.connect(virtual_devices=devices)
    spec = tf.TensorSpec((3,), tf.float32)
    read = tf.data.Dataset.from_generator(read_slowly, output_signature=spec)
    data = read.batch(8).prefetch(8).map(lambda x: (x, x[:, :1])).prefetch(8)
    with engine.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    when = "on_train_batch_end" if place == "training" else "on_test_batch_end"
    callback = keras.callbacks.LambdaCallback(**{when: fail})
    trainer = tftpu.Trainer(model)
    trainer.fit(data, steps=4, validation_data=data, validation_steps=9, callbacks=[callback])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
