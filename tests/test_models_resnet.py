"""The stem of ResNet over blocks of pixels is the stem of the paper."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies import relative
from tftpu import models
from tftpu.config import Share
from tftpu.errors import UserError


def tiny(stem):
    fields = {"blocks": (1,), "width": 8, "image_size": 32, "classes": 5, "bottleneck": False}
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


def test_a_stem_that_cannot_be_is_refused():
    share = Share(32, 1, 1)
    with pytest.raises(UserError, match="space_to_depth"):
        models.config("resnet18", stem="space2depth").validate(share)
    with pytest.raises(UserError, match="not 33"):
        models.config("resnet18", stem="space_to_depth", image_size=33).validate(share)
