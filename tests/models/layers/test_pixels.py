"""Models that take uint8 pixels."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.training import make_trainer
from tftpu import models
from tftpu.models.layers import pixels


def small() -> keras.Model:
    fields = {"blocks": (1, 1), "width": 8, "stem": "small", "image_size": 8, "num_classes": 3}
    return models.build("resnet18", **fields, norm_batch=4)


def test_a_model_of_pixels_equals_the_model_of_standardised_numbers():
    model = small()
    whole = pixels.standardize_pixels(model)
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    numbers = images.astype(np.float32) / 64.0 - 1.2
    np.testing.assert_allclose(whole(images), model(numbers), atol=1e-5)
    assert whole.input.dtype == "uint8"
    assert whole.hyperparameters is model.hyperparameters
    assert [v.path for v in whole.variables] == [v.path for v in model.variables]


def test_a_mixed_precision_model_of_pixels_equals_the_model_of_standardised_numbers():
    tftpu.set_precision("mixed_bfloat16")
    model = small()
    images = np.arange(4 * 8 * 8 * 3).reshape(4, 8, 8, 3) % 256
    whole = pixels.standardize_pixels(model)(images.astype(np.uint8))
    assert whole.dtype == model(images.astype(np.float32) / 64.0 - 1.2).dtype
    np.testing.assert_array_equal(whole, model(images.astype(np.float32) / 64.0 - 1.2))


@pytest.mark.slow
def test_a_model_of_pixels_trains_on_replicas_with_soft_labels():
    from tftpu.optim.losses import SmoothedCrossentropy
    from tftpu.optim.metrics import Accuracy

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (16, 8, 8, 3), np.uint8)
    soft = rng.dirichlet(np.ones(3), 16).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((images, soft)).batch(8)
    losses = []
    for replicas in (1, 2):
        keras.utils.set_random_seed(0)
        with tftpu.connect(virtual_devices=replicas).scope():
            model = pixels.standardize_pixels(small())
            model.compile("sgd", SmoothedCrossentropy(0.1), metrics=[Accuracy()])
            trainer = make_trainer(model, steps_per_loop=2, log_every=2)
        losses.append(trainer.fit(data, steps=4).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
