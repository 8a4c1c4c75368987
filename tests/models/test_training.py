"""Every family of the zoo learns in every precision, and traces on a TPU slice."""

import math

import keras
import pytest
import tensorflow as tf

from tests.support.models import zoo
from tests.support.models.training import make_trainer
from tests.support.steps.simulated_slice import (
    assert_one_reduction_and_no_host_op,
    traced,
)

EXHAUSTIVE = pytest.mark.exhaustive


def case(family: str, policy: str):
    """Returns a case; `make test-slow` runs a CNN in float32, and a transformer in bfloat16."""
    usual = (family, policy) in (("resnet", "float32"), ("gpt", "mixed_bfloat16"))
    return pytest.param(family, policy, marks=() if usual else EXHAUSTIVE)


def cases() -> list:
    return [
        *(case(family, "float32") for family in zoo.TINY),
        *(case(family, "mixed_bfloat16") for family in zoo.TINY if family not in zoo.VARIANTS),
        *(case(family, "mixed_float16") for family in zoo.TINY),  # not a format of TPUs
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy"), cases())
def test_the_loss_on_a_few_examples_falls_to_less_than_a_tenth(family, policy):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    model = zoo.compiled(family)
    assert model.output.dtype == "float32"
    trainer = make_trainer(model, steps_per_loop=200, log_every=200)
    data = tf.data.Dataset.from_tensors(zoo.batch(family))
    history = trainer.fit(data, steps=200, validation_data=data).history
    chance = math.log(model.output.shape[-1])
    assert history["val_loss"][-1] < chance / 10


RANDOM = {"convnext": 0.5, "efficientnetv2": 0.5, "vit": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [f if f in ("resnet", "gpt") else pytest.param(f, marks=EXHAUSTIVE) for f in zoo.TINY],
)
def test_a_training_step_traces_on_a_slice(family, slice_of_eight):
    keras.config.set_dtype_policy("mixed_bfloat16")
    x, y = zoo.batch(family)
    fields = {"stochastic_depth": RANDOM[family]} if family in RANDOM else {}
    with slice_of_eight.scope():
        model = zoo.compiled(family, **fields)
    batch = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    step, ops = traced(model, batch, gradient_accumulation_steps=2)
    assert_one_reduction_and_no_host_op(step, ops)
