"""Trainers and small compiled models that several tests use."""

import keras

import tftpu


def make_trainer(
    model: keras.Model, workdir=None, *, writers=(), sample=None, hyperparameters=None, **options
) -> tftpu.Trainer:
    """Returns a trainer; `options` are the fields of `TrainOptions`."""
    return tftpu.Trainer(
        model,
        workdir,
        tftpu.TrainOptions(**options),
        writers=writers,
        sample=sample,
        hyperparameters=hyperparameters,
    )
