"""Mistakes in what `tftpu.preflight.check` is given: one clear message each, before any work."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu import preflight
from tftpu.errors import UserError
from tftpu.preflight import PreflightOptions, request

SPEC = tf.TensorSpec((64, 4)), tf.TensorSpec((64, 2))


def build() -> keras.Model:
    raise AssertionError("a mistake is found before a model is built")


def refused(message: str, **given: Any) -> None:
    defaults = {"model": build, "batch": SPEC, "slices": ["v5e-1"]}
    with pytest.raises(UserError, match=message):
        preflight.check(**{**defaults, **given})


def test_what_is_no_function_of_a_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    refused(r"'sequential.*' is not compiled", model=model)
    refused(r"The model is a str: give a compiled keras.Model", model="resnet50")
    refused(r"model_fn returned None", model=lambda: None)
    refused(r"'sequential.*' is not compiled: .* or give objectives", model=lambda: model)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (SPEC[0], r"Give the batch as \(x, y\)"),
        ((), r"batch=\(\): give the number of examples"),
        ("64", "batch='64': give the number of examples"),
        (64.0, r"batch=64.0: give the number of examples"),
        (True, "batch=True: give the number of examples"),
        (-8, "batch=-8: give the number of examples"),
        (None, "batch=None: give the number of examples"),
        (["v5e-8"], r"batch=\['v5e-8'\]: give the number of examples"),
        (([[0.0] * 4] * 64, [0] * 64), "The batch has 0.0 in it: .* np.asarray makes arrays"),
        ((np.array(["a"] * 64), np.zeros(64)), "which no TPU takes"),
        (tf.data.Dataset.range(8).batch(8), "give one batch of it"),
        ((tf.TensorSpec(()), tf.TensorSpec(())), r"no dimension"),
        ((SPEC[0], tf.TensorSpec((32, 2))), r"32 and 64 examples"),
        ((tf.TensorSpec((0, 4)), tf.TensorSpec((0, 2))), r"have 0 examples"),
        ((tf.TensorSpec((None, 4)), SPEC[1]), r"only static shapes"),
    ],
)
def test_what_is_no_batch(batch, message):
    refused(message, batch=batch)


def test_a_function_of_an_objective_takes_any_nest():
    request.refuse_batch({"images": SPEC[0]}, PreflightOptions(objectives=lambda model: []))


def test_slices_are_listed_once_each():
    assert [s.name for s in request.parse_slices(["v5e-1", "v5litepod-1"])] == ["v5e-1"]
    refused(r"slices='v5e-1': give a list", slices="v5e-1")
    refused(r"No slice was given", slices=[])
    refused(r"v5e8", slices=["v5e8"], model=None, batch=None)  # before the model is looked at


def test_a_slice_that_the_engine_cannot_use():
    refused(r"does not support tpu7x: .*--config.cluster.engine=jax", slices=["v5e-8", "tpu7x-8"])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prices", {"v5": 1.0}, r"no generation 'v5'. Did you mean 'v5p'"),
        ("prices", {"v5e": -1.0}, r"prices\['v5e'\] is -1.0"),
        ("prices", {"v5e": "1"}, r"prices\['v5e'\] is '1'"),
        ("steps", -5, r"steps is -5"),
        ("steps", "5", r"steps is '5'"),
        ("examples_per_epoch", 0, r"examples_per_epoch is 0"),
        ("batch_unit", 0, r"batch_unit is 0"),
        ("time_limit", 0, r"time_limit is 0"),
        ("time_limit", "5", r"time_limit is '5'"),
        ("train", None, r"train is None: give tftpu.TrainConfig"),
        ("precision", "bfloat16", r"Did you mean 'mixed_bfloat16'"),
    ],
)
def test_options_without_a_meaning(field, value, message):
    options = PreflightOptions()
    setattr(options, field, value)
    refused(message, options=options)
