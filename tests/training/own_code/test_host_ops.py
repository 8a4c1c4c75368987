"""Layers that no TPU can run train on CPUs and GPUs, as in Keras."""

import keras
import numpy as np
import pytest

import tftpu


def history(build, x, y, replicas: int) -> list[float]:
    with tftpu.connect(virtual_devices=replicas).scope():
        keras.utils.set_random_seed(0)
        model = build()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    trainer = tftpu.Trainer(model, None)
    found = trainer.fit(x, y, batch_size=8, epochs=3, shuffle=False, validation_data=(x, y))
    return found.history["loss"] + found.history["val_loss"]


def images_model(*first: keras.Layer) -> keras.Model:
    rest = [keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6, 6, 1)), *first, *rest])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rotation_by_a_quarter_trains_as_rotated_images_do(replicas):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 6, 6, 1)).astype("float32"), rng.normal(size=(16, 1))

    def rotating():
        # Evaluation does not rotate: the model gets rotated images there.
        return images_model(keras.layers.RandomRotation((0.25, 0.25), seed=1))

    turned = np.rot90(x, axes=(1, 2))
    found = history(rotating, x, y, replicas)
    expected = history(images_model, turned, y, replicas)
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_lookup_trains_as_the_looked_up_ids_do(replicas):
    rng = np.random.default_rng(0)
    ids, y = rng.integers(0, 3, size=(16, 2)), rng.normal(size=(16, 1)).astype("float32")
    words = np.array([10, 20, 30])

    def embedding(*first: keras.Layer):
        rest = [keras.layers.Embedding(4, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((2,), dtype="int64"), *first, *rest])

    def looking_up():
        return embedding(keras.layers.IntegerLookup(vocabulary=words))

    found = history(looking_up, words[ids], y, replicas)
    np.testing.assert_allclose(found, history(embedding, ids + 1, y, replicas), rtol=1e-5)
