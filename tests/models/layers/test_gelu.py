"""The activation agrees with its definition, in float64, and with Keras's."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu.models.layers.gelu import gelu

X = np.linspace(-6.0, 6.0, 241)


def by_definition(x):
    """Returns value and slope, in Python's own float64."""
    share = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return x * share, share + x * density


def with_slope(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = gelu(x)
    return y, tape.gradient(y, x)


def test_value_and_slope_are_those_of_the_definition():
    for found, expected in zip(with_slope(tf.constant(X, tf.float32)), by_definition(X)):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("dtype", "digits"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_in_low_precision_it_is_rounded_once(dtype, digits):
    x = tf.cast(X, dtype)
    exact = by_definition(np.asarray(tf.cast(x, "float64")))
    for found, expected in zip(with_slope(x), exact):
        assert found.dtype == dtype
        np.testing.assert_allclose(tf.cast(found, "float64"), expected, rtol=digits, atol=1e-6)


def test_the_gradient_is_the_upstream_one_times_the_slope():
    x, upstream = tf.constant(X, tf.float32), tf.constant(X[::-1], tf.float32)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        here, kerass = gelu(x), keras.activations.gelu(x)
    found, expected = (tape.gradient(y, x, upstream) for y in (here, kerass))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_layer_with_gelu_is_saved_by_name():
    layer = keras.layers.Dense(3, activation=gelu)
    assert keras.layers.Dense.from_config(layer.get_config()).activation is gelu
