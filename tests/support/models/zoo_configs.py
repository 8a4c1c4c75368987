"""Trains the configs of the zoo for a few steps, shallow and on drawn batches.

KERAS_BACKEND=jax python -m tests.support.models.zoo_configs    prints the losses as JSON, by config
"""

import dataclasses
import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tftpu
from tftpu import input_pipelines
from tftpu.engines.engine import Engine
from tftpu.launch.run import experiment
from tftpu.launch.settings import config_flags

STEPS, EXAMPLES = 3, 8
_IMAGES = ["--config.model.image_size=32", "--config.data.image_size=32"]
_FLAGS = {
    "bert_base_sst2": ["--config.model.layers=1", "--config.model.vocabulary=512"],
    "convnext_tiny_imagenet": [*_IMAGES, "--config.model.blocks=(1,1,1,1)"],
    "digits_resnet": [],
    "efficientnetv2_s_imagenet": [*_IMAGES, "--config.model.blocks=(1,1,1,1,1,1)"],
    "llama_110m_tinystories": ["--config.model.layers=1", "--config.model.vocabulary=512"],
    "python_gpt": ["--config.model.layers=1"],
    "resnet50_imagenet": [*_IMAGES, "--config.model.blocks=(1,1,1,1)"],
    "vit_s16_imagenet": [*_IMAGES, "--config.model.layers=1"],
}
NAMES = tuple(sorted(path.stem for path in config_flags.CONFIGS.glob("[!_]*.py")))


def losses(config: str, engine: Engine) -> list[float]:
    """Returns the losses of a few steps of a config, without what is drawn at random in them."""
    settings = config_flags.load(config, [*_FLAGS[config], "--config.train.seed=3"])
    small = {"dropout": 0.0, "stochastic_depth": 0.0, "norm_batch": EXAMPLES}
    small = {name: value for name, value in small.items() if hasattr(settings.model, name)}
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, **small))
    with engine.scope():
        model = experiment.build_model(settings)
    batch = _drawn(_spec(settings), _classes(settings))
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    options = tftpu.TrainConfig(log_every=1, global_clipnorm=settings.train.global_clipnorm)
    trainer = tftpu.Trainer(model, None, options, engine=engine)
    history = trainer.fit(dataset, steps_per_epoch=1, epochs=STEPS, verbose=0)
    return history.history["loss"]


def _spec(settings: Any) -> Any:
    if settings.data.name != "sst2":
        return input_pipelines.batch_spec(settings.data, EXAMPLES)
    row = tf.TensorSpec((EXAMPLES, 128), tf.int32)  # records without files
    return {"tokens": row, "segments": row}, tf.TensorSpec((EXAMPLES,), tf.int32)


def _classes(settings: Any) -> int:
    """Returns how many values the whole numbers of a batch have."""
    model = settings.model
    return (
        2 if settings.data.name == "sst2" else getattr(model, "num_classes", 0) or model.vocabulary
    )


def _drawn(spec: Any, classes: int) -> Any:
    rng = np.random.default_rng(7)

    def draw(part: tf.TensorSpec) -> np.ndarray:
        dtype = part.dtype.as_numpy_dtype
        if part.dtype.is_integer:
            return rng.integers(0, classes, part.shape).astype(dtype)
        return rng.uniform(size=part.shape).astype(dtype)

    return keras.tree.map_structure(draw, spec)


def main() -> None:
    engine = tftpu.connect("none", virtual_devices=4, mesh="data:2,fsdp:2")
    print(json.dumps({config: losses(config, engine) for config in NAMES}))


if __name__ == "__main__":
    main()
