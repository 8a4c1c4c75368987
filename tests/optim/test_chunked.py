"""Cross-entropy in chunks of the classes or of the tokens is the whole one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu.optim import chunked as chunks
from tftpu.optim.chunked import Rows

WIDTH, VOCABULARY = 16, 1000


def factors(dtype="float32"):
    rng = np.random.default_rng(0)
    hidden = tf.cast(rng.normal(size=(2, 5, WIDTH)), dtype)
    matrix = tf.constant(rng.normal(size=(VOCABULARY, WIDTH)), "float32")
    return hidden, matrix, tf.constant(rng.integers(0, VOCABULARY, (2, 5)), "int32")


def value_and_gradients(loss, hidden, matrix, weight=None):
    weight = tf.reshape(tf.range(1.0, 11.0), (2, 5)) if weight is None else weight
    with tf.GradientTape() as tape:
        tape.watch([hidden, matrix])
        value = loss(hidden, matrix)
        total = tf.reduce_sum(value * weight)
    return [value, *tape.gradient(total, [hidden, matrix])]


@pytest.mark.medium
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("jit", [False, True])
def test_chunks_give_the_value_and_the_gradients_of_keras_cross_entropy(
    monkeypatch, smoothing, jit
):
    monkeypatch.setattr(chunks, "CHUNK", 300)
    hidden, matrix, labels = factors()
    smoothed = keras.losses.CategoricalCrossentropy(True, smoothing, reduction=None)

    def whole(hidden, matrix):
        return smoothed(tf.one_hot(labels, VOCABULARY), hidden @ tf.transpose(matrix))

    def chunked(hidden, matrix):
        return chunks.chunked_crossentropy(hidden, matrix, labels, smoothing)[0]

    chunked = tf.function(chunked, jit_compile=True) if jit else chunked
    expected = value_and_gradients(whole, hidden, matrix)
    for a, b in zip(value_and_gradients(chunked, hidden, matrix), expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_in_bfloat16_the_loss_is_summed_in_float32(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 300)
    hidden, matrix, labels = factors("bfloat16")
    found, *_ = chunks.chunked_crossentropy(hidden, matrix, labels)
    rounded = tf.cast(tf.cast(matrix, "bfloat16"), "float32")
    logits = tf.cast(hidden, "float32") @ tf.transpose(rounded)
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    assert found.dtype == "float32"
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("factor", [1.0, 300.0, -300.0])
@pytest.mark.parametrize("jit", [False, True])
def test_logits_far_apart_neither_overflow_nor_vanish(monkeypatch, factor, jit):
    monkeypatch.setattr(chunks, "CHUNK", 300)
    hidden, matrix, labels = factors()
    hidden *= factor
    chunked = tf.function(chunks.chunked_crossentropy, jit_compile=jit)
    logits = hidden @ tf.transpose(matrix)
    assert abs(factor) == 1 or tf.reduce_max(logits) - tf.reduce_min(logits) > 1000
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    found, plain, correct = chunked(hidden, matrix, labels)
    np.testing.assert_array_equal(found, plain)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(correct, tf.argmax(logits, -1, tf.int32) == labels)


def test_a_label_that_is_not_a_class_subtracts_no_logit(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 300)
    hidden, matrix, labels = factors()
    found, *_ = chunks.chunked_crossentropy(hidden, matrix, -tf.ones_like(labels))
    expected = tf.reduce_logsumexp(hidden @ tf.transpose(matrix), -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_the_loop_ends_for_a_loss_that_is_not_finite(monkeypatch, wrong):
    monkeypatch.setattr(chunks, "CHUNK", 300)
    hidden, matrix, labels = factors()
    broken = tf.tensor_scatter_nd_update(hidden, [[0, 0, 0]], [wrong])
    found = chunks.chunked_crossentropy(broken, matrix, labels)[0].numpy()
    assert not np.isfinite(found[0, 0])
    assert np.isfinite(found[1]).all()


@pytest.mark.parametrize(
    ("classes", "parts"), [(262_144, 8), (262_144, 1), (128_256, 16), (50_257, 1), (1000, 4)]
)
def test_each_chunk_of_classes_has_some(classes, parts):
    count, size = chunks.divide_classes(classes, parts)
    assert (count - 1) * size < classes // parts <= count * size
    assert size % chunks.LANES == 0 and parts * (size - chunks.LANES) <= chunks.CHUNK


class FourParts(Rows):
    """Rows in four parts, all on one device."""

    count = 4


@pytest.mark.medium
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [300, 700, 1000])  # 2, 1 and 1 of 5 positions at a time
def test_tokens_in_chunks_give_the_sum_and_its_gradients(monkeypatch, smoothing, chunk):
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    monkeypatch.setattr(chunks, "SUBLANES", 2)
    hidden, matrix, labels = factors()
    # One of the second part, at the place of the padding behind the first.
    labels = tf.tensor_scatter_nd_update(labels, [[0, 0]], [252])
    smoothed = keras.losses.CategoricalCrossentropy(True, smoothing, reduction=None)
    weight = tf.reshape(tf.range(1.0, 11.0), (2, 5))

    def summed(hidden, matrix):
        return chunks.summed_crossentropy(hidden, matrix, labels, weight, smoothing, FourParts())[0]

    def whole(hidden, matrix):
        losses = smoothed(tf.one_hot(labels, VOCABULARY), hidden @ tf.transpose(matrix))
        return tf.reduce_sum(losses * weight)

    for a, b in zip(
        value_and_gradients(summed, hidden, matrix, 3.0),
        value_and_gradients(whole, hidden, matrix, 3.0),
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-3)
    found = chunks.summed_crossentropy(hidden, matrix, labels, weight, smoothing, FourParts())[1]
    for rows in (chunks.WHOLE, FourParts()):  # 250 rows of a part are padded to 256
        by_class = chunks.chunked_crossentropy(hidden, matrix, labels, smoothing, rows)
        for a, b in zip(found, by_class):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [300.0, -300.0])
def test_tokens_whose_logits_are_far_apart_are_computed_again(monkeypatch, factor):
    monkeypatch.setattr(chunks, "CHUNK", 300)
    monkeypatch.setattr(chunks, "SUBLANES", 2)
    hidden, matrix, labels = factors()
    hidden *= factor
    logits = hidden @ tf.transpose(matrix)
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    assert tf.reduce_max(logits) - tf.reduce_min(logits) > 1000
    ones = tf.ones((2, 5))

    def summed(hidden, matrix):
        return chunks.summed_crossentropy(hidden, matrix, labels, ones, 0.0, FourParts())[0]

    value, d_hidden, d_matrix = value_and_gradients(summed, hidden, matrix, 1.0)
    np.testing.assert_allclose(value, tf.reduce_sum(expected), rtol=1e-5)
    d_logits = tf.nn.softmax(logits) - tf.one_hot(labels, VOCABULARY)
    np.testing.assert_allclose(d_hidden, d_logits @ matrix, rtol=1e-4, atol=1e-4)
    expected = tf.einsum("btc,btw->cw", d_logits, hidden)
    np.testing.assert_allclose(d_matrix, expected, rtol=1e-4, atol=0.05)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_the_loop_over_tokens_ends_for_a_loss_that_is_not_finite(wrong):
    hidden, matrix, labels = factors()
    broken = tf.tensor_scatter_nd_update(hidden, [[0, 0, 0]], [wrong])
    given = broken, matrix, labels, tf.ones((2, 5)), 0.0, FourParts()
    total, results = chunks.summed_crossentropy(*given)
    assert not np.isfinite(total) and np.isfinite(results.values[1]).all()


@pytest.mark.parametrize(
    ("time", "classes", "expected"),
    [
        (1024, 262_144, 32),
        (1000, 262_144, 16),
        (2048, 128_256, 128),
        (10, 6160, 10),
        (60, 6160, 32),
    ],
)
def test_positions_are_taken_with_little_padding(time, classes, expected):
    assert chunks.choose_positions(time, classes) == expected


@pytest.mark.parametrize(
    ("parts", "classes", "tokens", "dtype", "expected"),
    [
        (8, 262_144, (64, 1024), "bfloat16", True),
        (8, 262_144, (16, 1024), "bfloat16", False),  # fewer tokens than classes of a part
        (8, 262_144, (1024, 64), "bfloat16", False),  # 16 positions would be too many logits
        (8, 262_144, (64, 1024), "float16", False),
        (1, 1000, (64, 64), "float32", False),
    ],
)
def test_the_smaller_gradient_is_summed(parts, classes, tokens, dtype, expected):
    rows, hidden = Rows(), keras.KerasTensor((*tokens, 4), dtype)
    rows.count = parts
    assert chunks.takes_tokens(rows, hidden, classes) == expected
    rows.shares_tokens = False
    assert not chunks.takes_tokens(rows, hidden, classes)
