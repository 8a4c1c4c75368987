"""Predictions in shards on the JAX engine, for `tests/inference/test_predict.py`.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_predictions FOLDER

writes those of two devices.
"""

import sys

import tftpu
from tests.inference import test_predict
from tests.support.models.strategies import mlp


def main() -> None:
    """Predicts on two devices."""
    with tftpu.connect("none", 2, engine="jax").scope():
        trainer = test_predict.trainer_of(test_predict.of_known_weights(mlp()))
    test_predict.predict(trainer, test_predict.records(), test_predict.job(sys.argv[1]))


if __name__ == "__main__":
    main()
