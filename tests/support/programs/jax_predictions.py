"""Predictions in shards on the JAX engine, for `tests/inference/predictions.py`.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_predictions FOLDER

writes those of two devices.
"""

import sys

import tftpu
from tests.support import predictions
from tests.support.models.strategies import mlp
from tftpu.inference import predict


def main() -> None:
    """Predicts on two devices."""
    with tftpu.connect("none", 2, engine="jax").scope():
        trainer = predictions.trainer_of(predictions.of_known_weights(mlp()))
    predict.predict(trainer, predictions.records(), predictions.job(sys.argv[1]))


if __name__ == "__main__":
    main()
