"""Samples of byte models."""

import functools
import types
from typing import Any

import keras
import numpy as np

from tftpu.config import Experiment
from tftpu.engines import functions
from tftpu.launch.run import sample
from tftpu.launch.settings import config_flags


class Executor:
    """Only what a sample needs, and the real functions behind it."""

    def __init__(self, model: keras.Model):
        self.compiled = functools.partial(functions.compile_function, model)


def sampled(experiment: Experiment, *layers: keras.layers.Layer) -> str:
    tokens = keras.Input((experiment.data.context,), dtype="int32")
    model = keras.Sequential([tokens, keras.layers.Embedding(512, 2), *layers])
    for weight in model.layers[-1].weights[1:]:
        bias = np.zeros(512)
        bias[300], bias[ord("x")] = 200.0, 100.0
        weight.assign(bias)
    one_host = types.SimpleNamespace(count=1)
    trainer: Any = types.SimpleNamespace(model=model, executor=Executor(model), hosts=one_host)
    return sample.draw_text(experiment, trainer, 5)


def test_a_vocabulary_larger_than_bytes_is_sampled_as_bytes():
    """The extra tokens, however likely, stand for no byte."""
    experiment = config_flags.load("python_gpt", ["--config.model.vocabulary=512"])
    dense = keras.layers.Dense(512, kernel_initializer="zeros")
    assert sampled(experiment, dense) == "def xxxxx"


def test_a_model_that_does_not_write_has_no_sample():
    experiment = config_flags.load("python_gpt", [])
    flat = keras.layers.Flatten()
    assert sampled(experiment, flat, keras.layers.Dense(512)) == ""
