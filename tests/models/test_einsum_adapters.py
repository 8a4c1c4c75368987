"""Adapters above quantized kernels of EinsumDense, which KerasHub's and Keras's attention have."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models.adapted import stir
from tests.support.models.strategies import relative
from tftpu import models
from tftpu.models import adapters

X = np.random.default_rng(0).normal(size=(4, 6, 16)).astype("float32")


def build() -> keras.Model:
    """Returns attention of Keras between layers like those of KerasHub."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 16))
    y = keras.layers.EinsumDense("btd,ndh->btnh", (None, 2, 8), bias_axes="nh", name="query")(x)
    y = keras.layers.EinsumDense("btnh,nhd->btd", (None, 16), name="out")(y)
    y = keras.layers.MultiHeadAttention(2, 8, name="attention")(y, y) + y
    return keras.Model(x, keras.layers.Dense(3, name="head")(y))


def adapt(base: str) -> keras.Model:
    model = build()
    assert len(models.enable_lora(model, 3, base=base)) == 6
    return model


@pytest.mark.parametrize(("base", "near", "part"), [("int8", 0.03, 0.3), ("int4", 0.3, 0.2)])
def test_kernels_are_rounded_and_take_less_memory(base, near, part):
    plain, model = build(), adapt(base)
    assert relative(model(X), np.asarray(plain(X))) < near
    kernels = [v for v in model.weights if v.path.endswith("/kernel") and "head" not in v.path]
    floats = [v for v in plain.weights if v.path.endswith("/kernel") and "head" not in v.path]
    sizes = [sum(np.asarray(v).nbytes for v in group) for group in (kernels, floats)]
    assert len(kernels) == 6 and sizes[0] < part * sizes[1]


@pytest.mark.medium
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_merged_weights_give_the_outputs_and_the_gradients(base):
    """The gradients of y = x (W + A B): dA is dW B^T and dB is A^T dW."""
    model, plain = adapt(base), build()
    stir(model)
    models.assign_merged(plain, model)
    assert relative(plain(X), np.asarray(model(X))) < 2e-6

    def compute_gradients(of: keras.Model) -> dict[str, np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(of(X, training=False)))
        found = tape.gradient(loss, [v.value for v in of.trainable_variables])
        return {v.path: np.asarray(g) for v, g in zip(of.trainable_variables, found)}

    ours, whole = compute_gradients(model), compute_gradients(plain)
    layers = adapters.list_adapted(model)
    assert len(layers) == 6
    for layer in layers:
        a, b = (np.asarray(v) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
        kernel = whole[f"{layer.path}/kernel"]
        assert relative(ours[f"{layer.path}/lora_kernel_a"], kernel @ b.T) < 1e-4
        expected = a.reshape(-1, 3).T @ kernel.reshape(-1, kernel.shape[-1])
        assert relative(ours[f"{layer.path}/lora_kernel_b"], expected) < 1e-4
