"""Predictions in shards on the JAX engine, for `tests/inference/test_predict.py`.

    KERAS_BACKEND=jax python -m tests.support.jax_predictions FOLDER

writes those on one device and on two to FOLDER/1 and FOLDER/2.
"""

import sys

import tftpu
from tests.inference import test_predict
from tests.support.strategies import mlp


def main() -> None:
    """Predicts on one device, and on two."""
    for devices in (1, 2):
        with tftpu.connect("none", devices, engine="jax").scope():
            trainer = test_predict.trainer_of(test_predict.of_known_weights(mlp()))
        test_predict.predict(
            trainer, test_predict.records(), test_predict.job(f"{sys.argv[1]}/{devices}")
        )


if __name__ == "__main__":
    main()
