"""Attention agrees with its definition, written out in NumPy in float64."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu import models
from tftpu.errors import UserError
from tftpu.kernels import attention as attention_module
from tftpu.kernels.attention import attention, attention_by_heads

BATCH, TIME, HEADS, DIM = 2, 10, 4, 8


def draw(heads=HEADS, time=TIME, seed=0):
    return np.random.default_rng(seed).normal(size=(BATCH, time, heads, DIM)).astype("float32")


def qkv(key_heads=HEADS, key_time=TIME):
    return draw(), draw(key_heads, key_time, 1), draw(key_heads, key_time, 2)


def by_definition(query, key, value, sees=lambda b, t, s: True, soft_cap=None, sinks=None):
    """Computes one query at a time; `sees(b, t, s)`: does query t of example b see key s?"""
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    shared = query.shape[2] // key.shape[2]
    out = np.zeros(query.shape)
    for b, t, h in np.ndindex(*query.shape[:3]):
        seen = [s for s in range(key.shape[1]) if sees(b, t, s)]
        scores = np.array([query[b, t, h] @ key[b, s, h // shared] for s in seen]) / DIM**0.5
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
        out[b, t, h] = weights @ value[b, seen, h // shared] / total
    return out


def close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(found, "float64"), expected, atol=tolerance, rtol=0)


def test_every_query_sees_every_key():
    close(attention(*qkv()), by_definition(*qkv()))
    close(attention(*qkv(key_time=7)), by_definition(*qkv(key_time=7)))


def test_causal_queries_see_no_later_key():
    close(attention(*qkv(), causal=True), by_definition(*qkv(), lambda b, t, s: s <= t))


def draw_window(time, window, lengths=None):
    """Which keys causal queries see within a window, (batch, time, time) bool."""
    distance = np.arange(time)[:, None] - np.arange(time)[None]
    mask = np.repeat([(distance >= 0) & (distance < window)], BATCH, axis=0)
    return mask if lengths is None else mask & (np.arange(time)[None, None] < lengths[:, None])


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_of_queries_and_keys_may_be_a_window(causal):
    found = attention(*qkv(), causal=causal, mask=draw_window(TIME, 3))
    close(found, by_definition(*qkv(), lambda b, t, s: t - 3 < s <= t))


def test_scores_are_capped():
    close(attention(*qkv(), soft_cap=0.5), by_definition(*qkv(), soft_cap=0.5))


@pytest.mark.parametrize("key_heads", [2, HEADS])
def test_a_sink_takes_its_part_of_the_weights(key_heads):
    sinks = np.array([-3.0, 0.0, 2.0, 90.0], "float32")
    expected = by_definition(*qkv(key_heads), lambda b, t, s: s <= t, sinks=sinks)
    close(attention(*qkv(key_heads), causal=True, sinks=sinks), expected)


@pytest.mark.medium
def test_the_gradients_of_masks_caps_and_sinks_are_those_of_their_definition():
    """Against JAX's gradient of the definition."""
    given = [x.astype("float64") for x in (*qkv(2), np.array([-1.0, 0.0, 0.5, 2.0]))]
    weight = np.random.default_rng(3).normal(size=given[0].shape)

    def define(query, key, value, sinks):
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        scores = jnp.einsum("bthd,bshd->bhts", query, key) / DIM**0.5
        scores = 1.5 * jnp.tanh(scores / 1.5)
        distance = np.arange(TIME)[:, None] - np.arange(TIME)[None]
        weights = jnp.where((distance >= 0) & (distance < 4), jnp.exp(scores), 0)
        total = weights.sum(-1, keepdims=True) + jnp.exp(sinks)[None, :, None, None]
        return (jnp.einsum("bhts,bshd->bthd", weights / total, value) * weight).sum()

    with jax.enable_x64(True):
        expected = jax.grad(define, (0, 1, 2, 3))(*given)
    tensors = [tf.constant(x, "float32") for x in given]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        query, key, value, sinks = tensors
        found = attention(query, key, value, mask=draw_window(TIME, 4), soft_cap=1.5, sinks=sinks)
        loss = tf.reduce_sum(found * weight.astype("float32"))
    for one, other in zip(tape.gradient(loss, tensors), expected):
        close(one, other)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_consecutive_queries_share_a_key_head(key_heads):
    found = attention(*qkv(key_heads), causal=True)
    close(found, by_definition(*qkv(key_heads), lambda b, t, s: s <= t))


def test_packed_documents_do_not_see_one_another():
    segments = np.array([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3])
    found = attention(*qkv(), causal=True, segment_ids=segments)
    close(found, by_definition(*qkv(), lambda b, t, s: s <= t and segments[b, t] == segments[b, s]))


def test_queries_in_blocks_give_the_same_as_all_queries_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    given = [tf.constant(rng.normal(size=(1, 512, 2, DIM)), "float32") for _ in range(3)]
    segments = np.sort(rng.integers(0, 3, (1, 512)), axis=1)

    def with_gradients(blocks):
        monkeypatch.setattr(attention_module, "BLOCKS", blocks)
        with tf.GradientTape() as tape:
            tape.watch(given)
            found = attention(*given, causal=True, segment_ids=segments)
        return [found, *tape.gradient(found, given)]

    for a, b in zip(with_gradients(4), with_gradients(1024)):  # 1024 do not fit: one block
        close(a, b)


@pytest.mark.parametrize("packed", [False, True])
def test_heads_before_time_give_the_same_output_and_gradients(packed):
    segments = np.array([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3]) if packed else None
    weight = draw(seed=3)

    def with_gradients(function):
        given = [tf.constant(x) for x in qkv()]
        with tf.GradientTape() as tape:
            tape.watch(given)
            found = function(*given)
            loss = tf.reduce_sum(found * weight)
        return [found, *tape.gradient(loss, given)]

    def by_heads(*given):
        turned = (tf.transpose(x, (0, 2, 1, 3)) for x in given)
        return tf.transpose(attention_by_heads(*turned, segment_ids=segments), (0, 2, 1, 3))

    expected = with_gradients(lambda *given: attention(*given, segment_ids=segments))
    for a, b in zip(with_gradients(by_heads), expected):
        close(a, b)


def test_padding_is_seen_by_no_query():
    mask = np.arange(TIME)[None] < np.array([[6], [10]])
    close(attention(*qkv(), mask=mask), by_definition(*qkv(), lambda b, t, s: mask[b, s]))


def test_a_query_without_keys_is_finite_and_so_is_its_gradient():
    query = tf.constant(draw())
    with tf.GradientTape() as tape:
        tape.watch(query)
        found = attention(query, *qkv()[1:], mask=np.zeros((BATCH, TIME), bool))
    assert np.isfinite(found).all() and np.isfinite(tape.gradient(found, query)).all()


def test_gradients_are_those_of_the_differentiated_formula():
    given = [tf.constant(x) for x in qkv()]
    mask = np.arange(TIME)[None] < np.array([[6], [10]])
    weight = draw(seed=3)
    sees = np.tril(np.ones((TIME, TIME), bool))[None, None] & mask[:, None, None]

    def formula(query, key, value):
        scores = tf.einsum("bthd,bshd->bhts", query, key) / DIM**0.5
        weights = tf.nn.softmax(tf.where(sees, scores, -np.inf))
        return tf.einsum("bhts,bshd->bthd", weights, value)

    def gradients(function):
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = tf.reduce_sum(function(*given) * weight)
        return tape.gradient(loss, given)

    found = gradients(lambda *given: attention(*given, causal=True, mask=mask))
    for a, b in zip(found, gradients(formula)):
        close(a, b)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("float16", 4e-3)])
def test_low_precision_loses_no_more_than_its_rounding(dtype, tolerance):
    arrays = [tf.cast(x, dtype) for x in qkv()]
    found = attention(*arrays, causal=True)
    assert found.dtype == dtype
    exact = by_definition(*(tf.cast(x, "float32") for x in arrays), lambda b, t, s: s <= t)
    close(tf.cast(found, "float32"), exact, tolerance)


def test_an_unknown_implementation_fails_with_a_suggestion():
    with pytest.raises(UserError, match="Did you mean 'flash'"):
        attention(*qkv(), implementation="flsh")
    experiment = models.config("gpt2_small", attention="flsh")
    with pytest.raises(UserError, match="Did you mean 'flash'"):
        experiment.validate(None)


def test_a_model_takes_any_length_and_sees_no_later_token():
    model = models.build("gpt2_small", layers=2, width=32, heads=4, vocabulary=64, context=16)
    tokens = keras.random.randint((2, 12), 0, 64, seed=0)
    whole, prefix = model(tokens), model(tokens[:, :7])
    close(whole[:, :7], np.asarray(prefix), 1e-5)
