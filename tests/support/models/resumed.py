"""A small run that is stopped and resumed."""

import json

import keras
import tensorflow as tf

import tftpu
from tests.support.models.strategies import random_batches
from tests.support.models.training import make_trainer
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.models.layers.normalization import GhostBatchNormalization

STEPS = 40


def pipeline() -> ArrayPipeline:
    x, y, _ = random_batches(1, 50, False)[0]
    return ArrayPipeline(
        examples=(x, y),
        global_batch_size=16,
        seed=4,
        # Noise drawn for each example: a resumed run must repeat the augmentation.
        prepare=lambda examples, seeds: (
            examples[0] + tf.cast(seeds[:, :1], tf.float32) / 2.0**31,
            examples[1],
        ),
    )


def trainer(workdir, replicas: int, **options) -> tftpu.Trainer:
    keras.utils.set_random_seed(8)
    with tftpu.connect(virtual_devices=replicas).scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8),
                keras.layers.Reshape((1, 8)),
                GhostBatchNormalization(2),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"])
    options = {
        "checkpoint_every": 4,
        "steps_per_loop": 3,
        "log_every": 5,
        "ema_momentum": 0.9,
        **options,
    }
    return make_trainer(model, workdir, **options)


def fit(trainer: tftpu.Trainer, callbacks=(), data=None):
    evaluation = tf.data.Dataset.from_tensor_slices(random_batches(1, 50, False)[0][:2]).batch(20)
    return trainer.fit(
        data or pipeline(),
        steps=STEPS,
        validation_data=evaluation,
        eval_every=10,
        callbacks=callbacks,
    )


def outcome(trainer: tftpu.Trainer, workdir) -> tuple[list[bytes], list[dict]]:
    """Returns all variables, and metrics.jsonl without the fields that depend on the clock."""
    bits = [
        v.numpy().tobytes()
        for group in trainer.executor.variables.list_groups().values()
        for v in group
    ]
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["time"]
        line.pop("examples_per_sec", None)
    return bits, lines
