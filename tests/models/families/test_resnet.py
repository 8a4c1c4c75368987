"""All implementations of the ResNet stem equal the stem of the paper."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models.strategies import relative
from tftpu import models
from tftpu.config import PerReplicaBatch
from tftpu.errors import UserError


def tiny(stem):
    fields = {"blocks": (1,), "width": 8, "image_size": 32, "num_classes": 5, "bottleneck": False}
    return models.build("resnet18", stem=stem, **fields)


def test_the_stem_by_space_to_depth_has_the_weights_outputs_and_gradients_of_the_7x7():
    plain, blocked = tiny("imagenet"), tiny("space_to_depth")
    paths = [[v.path for v in model.variables] for model in (plain, blocked)]
    assert paths[0] == paths[1]
    rng = np.random.default_rng(0)
    weights = [rng.uniform(0.1, 1.0, w.shape) for w in plain.get_weights()]
    images = rng.normal(size=(4, 32, 32, 3)).astype("float32")
    found = []
    for model in (plain, blocked):
        model.set_weights(weights)
        kernel = model.get_layer("stem_conv").kernel
        stem = keras.Model(model.input, model.get_layer("stem_conv").output)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(stem(images) ** 2)
        found.append([model(images), tape.gradient(loss, kernel.value)])
    for a, b in zip(*found):
        assert relative(a, b) < 1e-6


def papers_stem(image_size: int) -> keras.Model:
    """Returns the stem made of Keras's own layers; the batch shares its statistics."""
    images = keras.Input((image_size, image_size, 3))
    x = keras.layers.ZeroPadding2D(3)(images)
    x = keras.layers.Conv2D(8, 7, strides=2, use_bias=False)(x)
    x = keras.layers.BatchNormalization(epsilon=1e-5, momentum=0.9)(x)
    x = keras.layers.ZeroPadding2D(1)(keras.layers.ReLU()(x))
    return keras.Model(images, keras.layers.MaxPooling2D(3, strides=2)(x))


@pytest.mark.parametrize(
    "stem, size, norm_batch",
    [("imagenet", size, 4) for size in (32, 35, 37, 38)]  # 16, 18, 19, 19 pixels before the pool
    + [("space_to_depth", 32, 4), ("space_to_depth", 38, 4), ("imagenet", 38, "global")],
)
def test_the_stem_and_its_gradients_are_those_of_kerass_layers(stem, size, norm_batch):
    model = models.build(
        "resnet18",
        **{"blocks": (1,), "width": 8, "image_size": size, "num_classes": 5, "bottleneck": False},
        **{"stem": stem, "norm_batch": norm_batch},
    )
    ours = keras.Model(model.input, model.get_layer("stem_act").output)
    theirs = papers_stem(size)
    rng = np.random.default_rng(0)
    weights = [rng.normal(1.0, 0.5, w.shape) for w in theirs.get_weights()]
    images = rng.normal(size=(4, size, size, 3)).astype("float32")
    found = []
    for model in (ours, theirs):
        # In order: kernel, gamma, beta, moving mean and variance.
        for variable, value in zip(model.variables, weights):
            variable.assign(np.abs(value))
        evaluated = model(images, training=False)
        with tf.GradientTape() as tape:
            y = model(images, training=True)
            loss = tf.reduce_sum(y * np.random.default_rng(1).normal(size=y.shape))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        found.append(
            [evaluated, y, *gradients, *(v.numpy() for v in model.non_trainable_variables)]
        )
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < 2e-5


def test_an_impossible_stem_fails_with_a_clear_error():
    share = PerReplicaBatch(32, 1, 1)
    with pytest.raises(UserError, match="space_to_depth"):
        models.config("resnet18", stem="space2depth").validate(share)
    with pytest.raises(UserError, match="not 33"):
        models.config("resnet18", stem="space_to_depth", image_size=33).validate(share)
