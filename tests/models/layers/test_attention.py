"""Attention agrees with its definition, written out in NumPy in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu import models
from tftpu.errors import UserError
from tftpu.models.layers import attention as attention_module
from tftpu.models.layers.attention import attention, attention_by_heads

BATCH, TIME, HEADS, DIM = 2, 10, 4, 8


def draw(heads=HEADS, time=TIME, seed=0):
    return np.random.default_rng(seed).normal(size=(BATCH, time, heads, DIM)).astype("float32")


def qkv(key_heads=HEADS, key_time=TIME):
    return draw(), draw(key_heads, key_time, 1), draw(key_heads, key_time, 2)


def by_definition(query, key, value, sees=lambda b, t, s: True):
    """Computes one query at a time; `sees(b, t, s)`: does query t of example b see key s?"""
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    shared = query.shape[2] // key.shape[2]
    out = np.zeros(query.shape)
    for b, t, h in np.ndindex(*query.shape[:3]):
        seen = [s for s in range(key.shape[1]) if sees(b, t, s)]
        scores = np.array([query[b, t, h] @ key[b, s, h // shared] for s in seen]) / DIM**0.5
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ value[b, seen, h // shared] / weights.sum()
    return out


def close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(found, "float64"), expected, atol=tolerance, rtol=0)


def test_every_query_sees_every_key():
    close(attention(*qkv()), by_definition(*qkv()))
    close(attention(*qkv(key_time=7)), by_definition(*qkv(key_time=7)))


def test_causal_queries_see_no_later_key():
    close(attention(*qkv(), causal=True), by_definition(*qkv(), lambda b, t, s: s <= t))


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
