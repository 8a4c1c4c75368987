"""Batch statistics and gradients from a 1x1 convolution's factors are those of its output."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models.strategies import relative
from tftpu import models
from tftpu.models.layers.normalization import GhostBatchNormalization
from tftpu.models.layers.pointwise import PointwiseConv, PointwiseNormalization, Sum
from tftpu.models.sizes import ResNet

BATCH, FILTERS = 12, 24
WITHIN = [4, 12]  # examples that share statistics: three groups, or one


def layers(conv: type, policy: str, within: int):
    """Returns a convolution, its norm, and a function that applies both in training."""
    keras.utils.set_random_seed(0)
    pointwise = conv is PointwiseConv
    conv = conv(FILTERS, 1, use_bias=False, dtype=policy)
    norm = PointwiseNormalization if pointwise else GhostBatchNormalization
    norm = norm(within, dtype=policy)
    conv.build((BATCH, 5, 5, 8))
    product = (BATCH, 5, 5, FILTERS)
    norm.build((product, (BATCH, 5, 5, 8), (8, FILTERS)) if pointwise else product)
    total = Sum(dtype=policy)
    rng = np.random.default_rng(1)
    norm.gamma.assign(rng.normal(1.0, 0.3, FILTERS))
    norm.beta.assign(rng.normal(0.0, 0.3, FILTERS))
    return conv, norm, lambda x: total([norm(conv(x), training=True)])


def results(conv: type, policy: str, within: int, mean: float = 0.0) -> dict:
    """Returns output, gradients of a nonlinear loss and moving statistics, float32."""
    conv, norm, apply = layers(conv, policy, within)
    rng = np.random.default_rng(2)
    x = tf.constant(np.maximum(rng.normal(mean, 1.0, (BATCH, 5, 5, 8)), 0.0), tf.float32)
    weight = tf.constant(rng.normal(size=(BATCH, 5, 5, FILTERS)), tf.float32)
    sources = {"x": x, "kernel": conv.kernel.value, "gamma": norm.gamma.value}
    sources["beta"] = norm.beta.value

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cast(apply(tf.cast(x, conv.compute_dtype)), tf.float32)
            loss = tf.reduce_sum(y * weight + 0.1 * y**3)
        return y, tape.gradient(loss, sources)

    y, gradients = run()
    moved = {"mean": norm.moving_mean.numpy(), "variance": norm.moving_variance.numpy()}
    return {"output": y, **gradients, **moved}


@pytest.mark.medium
@pytest.mark.parametrize("mean", [0.0, 5.0])
@pytest.mark.parametrize("within", WITHIN)
def test_statistics_output_and_gradients_are_those_of_the_product(within, mean):
    convolutions = (keras.layers.Conv2D, PointwiseConv)
    plain, here = (results(conv, "float32", within, mean) for conv in convolutions)
    for name, expected in plain.items():
        assert relative(here[name], expected) < 5e-5, name


@pytest.mark.medium
@pytest.mark.parametrize("within", WITHIN)
def test_in_bfloat16_it_is_as_close_to_float32_as_the_product(within):
    exact = results(keras.layers.Conv2D, "float32", within)
    plain = results(keras.layers.Conv2D, "mixed_bfloat16", within)
    here = results(PointwiseConv, "mixed_bfloat16", within)
    for name, expected in exact.items():
        assert relative(here[name], expected) < 1.5 * relative(plain[name], expected) + 1e-5, name


def test_the_product_is_read_once_and_that_of_one_group_never():
    """Only the normalisation reads it: neither the statistics nor the backward pass do."""

    def readers(conv, within):
        conv, norm, apply = layers(conv, "float32", within)

        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(apply(x) ** 2)
            return tape.gradient(loss, [x, conv.kernel.value, norm.gamma.value])

        graph = run.get_concrete_function(tf.TensorSpec((BATCH, 5, 5, 8))).graph
        first = next(op for op in graph.get_operations() if op.type == "Conv2D")
        found, tensors = [], [first.outputs[0]]
        while tensors:
            for op in tensors.pop().consumers():
                copies = op.type in ("Identity", "StopGradient", "Reshape")
                (tensors.extend if copies else found.append)(op.outputs if copies else op.type)
        return [type for type in found if type != "Shape"]

    assert readers(PointwiseConv, 4) == ["Mul"]
    assert readers(PointwiseConv, BATCH) == []
    assert len(readers(keras.layers.Conv2D, BATCH)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("norm_batch", [64, 128])
def test_a_resnet_of_large_groups_trains_as_one_of_plain_convolutions(norm_batch, monkeypatch):
    """Shortcuts have strides 1 and 2, and their products are added to those of the branch."""
    fields = {"blocks": (1, 1), "width": 8, "stem": "small", "image_size": 8, "num_classes": 5}
    rng = np.random.default_rng(3)
    images = rng.normal(size=(128, 8, 8, 3)).astype("float32")
    labels = rng.integers(0, 5, 128)

    def trained():
        keras.utils.set_random_seed(1)
        model = models.build(ResNet("tiny", norm_batch=norm_batch, **fields))
        for variable in model.trainable_variables:  # a branch that starts at 0 would hide errors
            variable.assign(variable + 0.1 * rng_of(variable.path).normal(size=variable.shape))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        losses = model.fit(images, labels, batch_size=128, epochs=3, shuffle=False, verbose=0)
        return model, losses.history["loss"]

    def rng_of(path):
        return np.random.default_rng(sum(path.encode()))

    here, losses = trained()
    assert any(isinstance(layer, PointwiseConv) for layer in here.layers)
    monkeypatch.setattr("tftpu.models.families.resnet.LARGE_GROUP", 1000)
    plain, expected = trained()
    assert not any(isinstance(layer, PointwiseConv) for layer in plain.layers)
    assert [v.path for v in here.variables] == [v.path for v in plain.variables]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert expected[-1] < expected[0]
