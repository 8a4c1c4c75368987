"""Blocks that the backward pass recomputes save memory and change no number."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models import zoo
from tests.support.models.strategies import relative
from tests.support.steps.simulated_slice import (
    assert_one_reduction_and_no_host_op,
    traced,
)
from tests.support.steps.stepping import train_step
from tftpu import models, preflight
from tftpu.engines import keras_internals
from tftpu.errors import UserError

# Random layers have to draw the same numbers twice.
RANDOM = {
    "convnext": {"stochastic_depth": 0.5},
    "efficientnetv2": {"stochastic_depth": 0.5, "dropout": 0.2},
    "vit": {"stochastic_depth": 0.5, "dropout": 0.2},
    "bert": {"dropout": 0.2},
    "gpt": {"dropout": 0.2},
}


def after_a_step(family: str, remat: str, policy: str, weights: list) -> dict[str, np.ndarray]:
    keras.config.set_dtype_policy(policy)
    with keras_internals.fresh_names():
        model = zoo.compiled(family, remat=remat, **RANDOM.get(family, {}))
    model.set_weights(weights)
    # Plain descent: a weight moves by its gradient.
    model.compile(keras.optimizers.SGD(1.0), keras.losses.SparseCategoricalCrossentropy(True))
    x, y = zoo.batch(family)
    specs = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    step = train_step(model, specs, gradient_accumulation_steps=2, seed=3)
    tf.function(step.train)((x, y))
    return {v.path: v.numpy() for v in model.weights}


def cases() -> list:
    families = [family for family in zoo.TINY if family not in zoo.VARIANTS]
    usual, rare = ("resnet", "gpt"), pytest.mark.exhaustive
    float32 = [pytest.param(f, "float32", marks=[] if f in usual else rare) for f in families]
    half = [pytest.param(f, "mixed_bfloat16", marks=rare) for f in usual]
    return [*float32, *half]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy"), cases())
def test_gradients_and_statistics_are_those_of_the_model_that_keeps_activations(family, policy):
    weights = zoo.compiled(family).get_weights()
    for weight in weights:  # a branch that starts at zero would pass no gradient
        weight += 0.1 * np.random.default_rng(0).normal(size=weight.shape)
    kept, again = (after_a_step(family, remat, policy, weights) for remat in ("none", "block"))
    assert list(again) == list(kept)  # the paths, in their order
    # TensorFlow may fuse, and so round, the two differently.
    bound = 1e-5 if policy == "float32" else 1e-3
    for path, value in kept.items():
        assert relative(again[path], value) < bound, path


@pytest.mark.parametrize("family", ["gpt", "resnet", "vit"])
def test_the_layers_are_those_of_the_model_that_keeps_activations(family):
    kept, again = zoo.compiled(family), zoo.compiled(family, remat="block")
    assert [layer.name for layer in again.layers] == [layer.name for layer in kept.layers]
    x, _ = zoo.batch(family)
    again.set_weights(kept.get_weights())
    np.testing.assert_array_equal(again(x), kept(x))


def test_segments_reach_the_blocks():
    x, _ = zoo.batch("gpt")
    features = {"tokens": x, "segments": np.repeat([[1, 2]], 6, axis=1).repeat(len(x), axis=0)}
    kept, again = zoo.compiled("gpt"), zoo.compiled("gpt", remat="block")
    again.set_weights(kept.get_weights())
    expected = kept(features, training=True)
    assert relative(again(features, training=True), expected) < 1e-6
    assert relative(again(x, training=True), expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", pytest.param("resnet", marks=pytest.mark.exhaustive)])
def test_a_model_with_remat_traces_on_a_slice(family, slice_of_eight):
    keras.config.set_dtype_policy("mixed_bfloat16")
    x, y = zoo.batch(family)
    with slice_of_eight.scope():
        model = zoo.compiled(family, remat="block")
    batch = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    step, ops = traced(model, batch, gradient_accumulation_steps=2)
    assert_one_reduction_and_no_host_op(step, ops)


def test_an_unknown_remat_fails_with_a_suggestion():
    with pytest.raises(UserError, match=r"no model\.remat 'blocks'.*'block'"):
        models.build("gpt2_small", layers=1, remat="blocks")


def test_remat_on_another_backend_fails_with_those_that_have_it(monkeypatch):
    x, _ = zoo.batch("gpt")
    model = zoo.build("gpt", remat="block")
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(UserError, match=r"TensorFlow and JAX backends, but Keras runs on torch"):
        model(x, training=True)


@pytest.mark.exhaustive
@pytest.mark.compiles
def test_remat_halves_the_memory_on_a_tpu():
    tokens = tf.TensorSpec((8 * 64, 256), tf.int32)

    def memory(remat):
        sizes = {"vocabulary": 128, "context": 256, "layers": 3, "width": 128, "heads": 2}

        def model():
            built = models.build("gpt2_small", remat=remat, **sizes)
            built.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return built

        return preflight.check(model, (tokens, tokens), ["v5e-8"]).slices[0].hbm["temporaries"]

    kept, again = memory("none"), memory("block")
    assert again < kept / 2, (kept, again)
