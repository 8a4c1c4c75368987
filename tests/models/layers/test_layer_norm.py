"""The layer normalisation of the transformers: Keras's values, and the gradients of its formula."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models.strategies import relative
from tftpu.models.layers.layer_norm import LayerNormalization

EPSILON = 1e-5


def layers(dtype: str) -> tuple[LayerNormalization, keras.layers.LayerNormalization]:
    """Returns our layer and Keras's, with the same weights."""
    rng = np.random.default_rng(0)
    both = (
        LayerNormalization(EPSILON, dtype=dtype),
        keras.layers.LayerNormalization(epsilon=EPSILON, dtype=dtype),
    )
    gamma, beta = rng.normal(1.0, 0.5, 24), rng.normal(size=24)
    for layer in both:
        layer.build((None, None, 24))
        layer.set_weights([gamma, beta])
    return both


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and the gradient of a loss by the outputs, (2, 5, 24)."""
    rng = np.random.default_rng(1)
    return rng.normal(3.0, 2.0, (2, 5, 24)), rng.normal(size=(2, 5, 24))


def written_out(x: np.ndarray, d_y: np.ndarray, gamma: np.ndarray) -> list[np.ndarray]:
    """Returns the gradients by x, gamma and beta, by the Jacobian of every token in float64."""
    d_x = np.empty_like(x)
    units = np.empty_like(x)
    width = x.shape[-1]
    for place in np.ndindex(x.shape[:-1]):
        row = x[place]
        deviation = np.sqrt(row.var() + EPSILON)
        unit = (row - row.mean()) / deviation
        jacobian = (np.eye(width) - 1.0 / width - np.outer(unit, unit) / width) / deviation
        d_x[place] = jacobian @ (d_y[place] * gamma)
        units[place] = unit
    return [d_x, (d_y * units).sum((0, 1)), d_y.sum((0, 1))]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("mixed_bfloat16", 1e-2)])
def test_values_and_gradients(dtype, tolerance):
    ours, kerass = layers(dtype)
    x, d_y = tokens()
    given = tf.constant(x, "bfloat16" if "bfloat16" in dtype else "float32")
    with tf.GradientTape() as tape:
        tape.watch(given)
        found = ours(given)
        loss = tf.reduce_sum(tf.cast(found, tf.float32) * tf.constant(d_y, tf.float32))
    gradients = tape.gradient(loss, [given, *(v.value for v in ours.trainable_variables)])
    assert found.dtype == given.dtype
    assert relative(np.asarray(found, "float32"), np.asarray(kerass(given), "float32")) < tolerance
    for gradient, wanted in zip(gradients, written_out(x, d_y, ours.gamma.numpy())):
        assert relative(np.asarray(gradient, "float32"), wanted) < tolerance


def test_its_config_makes_the_same_layer():
    layer = layers("mixed_bfloat16")[0]
    copy = LayerNormalization.from_config(layer.get_config())
    copy.build((None, None, 24))
    copy.set_weights(layer.get_weights())
    x = tf.constant(tokens()[0], "bfloat16")
    np.testing.assert_array_equal(np.asarray(copy(x)), np.asarray(layer(x)))
    assert copy.name == layer.name
