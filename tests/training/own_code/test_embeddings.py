"""Tokens that occur several times in a batch: their gradients are added before they are squared."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import relative
from tests.support.models.training import make_trainer

RATE, STEPS, EPSILON = 0.1, 4, 1e-7
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 3, (16, 5)).astype(np.int32)  # 3 tokens in 80 places
WANTED = rng.normal(size=(16, 2)).astype(np.float32)
BATCHES = tf.data.Dataset.from_tensors((TOKENS, WANTED)).repeat(STEPS)


def model(optimizer: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(3, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
    built = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    kinds = {"adam": keras.optimizers.Adam, "rmsprop": keras.optimizers.RMSprop}
    built.compile(kinds[optimizer](RATE, epsilon=EPSILON), "mse")
    return built


def dense(optimizer: str) -> np.ndarray:
    """Returns the trained matrix; its lookup is a product, and the optimizer is from the paper."""
    weights = [tf.constant(w) for w in model(optimizer).get_weights()]
    first, second = ([np.zeros(w.shape) for w in weights] for _ in range(2))
    for step in range(1, STEPS + 1):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            matrix, kernel, bias = weights
            looked_up = tf.one_hot(TOKENS, 3) @ matrix  # (batch, time, width)
            answers = tf.reshape(looked_up, (16, -1)) @ kernel + bias
            loss = tf.reduce_mean(tf.square(answers - WANTED))
        for i, gradient in enumerate(tape.gradient(loss, weights)):
            g = np.asarray(gradient, np.float64)
            if optimizer == "adam":  # Kingma & Ba 2014, end of section 2
                first[i] = 0.9 * first[i] + 0.1 * g
                second[i] = 0.999 * second[i] + 0.001 * g * g
                rate = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
                move = rate * first[i] / (np.sqrt(second[i]) + EPSILON)
            else:  # Hinton 2012
                second[i] = 0.9 * second[i] + 0.1 * g * g
                move = RATE * g / np.sqrt(second[i] + EPSILON)
            weights[i] = tf.constant(weights[i].numpy() - move, tf.float32)
    return weights[0].numpy()


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_an_embedding_follows_the_formula_of_its_optimizer_where_keras_fit_does_not(optimizer):
    expected = dense(optimizer)
    theirs = model(optimizer)
    theirs.fit(BATCHES, verbose=0)
    assert relative(theirs.get_weights()[0], expected) > 0.03
    with tftpu.connect(virtual_devices=2).scope():
        ours = model(optimizer)
    make_trainer(ours).fit(BATCHES, steps=STEPS)
    assert relative(ours.get_weights()[0], expected) < 1e-5
