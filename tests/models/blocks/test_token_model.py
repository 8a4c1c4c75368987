"""Rows packed with several documents: each gives the same result as in its own row."""

import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models import zoo
from tests.support.models.strategies import relative
from tftpu import models

LENGTHS = (5, 4)  # of two documents; the rest of the row is padding


def packed(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns features of rows that hold documents of `LENGTHS`, one after the other."""
    segments = np.zeros_like(tokens)
    positions = np.zeros_like(tokens)
    start = 0
    for number, length in enumerate(LENGTHS, 1):
        segments[:, start : start + length] = number
        positions[:, start : start + length] = np.arange(length)
        start += length
    return {"tokens": tokens, "segments": segments, "positions": positions}


@pytest.mark.medium
@pytest.mark.parametrize("family", ["bert", "gpt", "llama"])
def test_a_document_gets_the_same_logits_in_a_packed_row_as_in_its_own(family):
    model = models.build(zoo.TINY[family])
    for variable in model.trainable_variables:  # so that positions matter as much as tokens
        variable.assign(variable * 10)
    tokens, _ = zoo.batch(family)
    logits = model(packed(tokens)).numpy()
    start = 0
    for length in LENGTHS:
        document = slice(start, start + length)
        assert relative(logits[:, document], model(tokens[:, document])) < 1e-5
        start += length
    assert relative(logits[:, :9], model(tokens).numpy()[:, :9]) > 0.01


@pytest.mark.parametrize("family", ["bert_classes", "gpt", "llama"])
def test_plain_token_ids_are_one_document_from_position_0(family):
    model = models.build(zoo.TINY[family])
    tokens, _ = zoo.batch(family)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    whole = {"tokens": tokens, "segments": np.ones_like(tokens), "positions": positions}
    for features in ({"tokens": tokens}, whole):
        np.testing.assert_allclose(model(features), model(tokens), rtol=1e-5, atol=1e-6)


def test_bert_ignores_padding_and_reads_the_types():
    model = models.build(zoo.TINY["bert_classes"])
    for variable in model.trainable_variables:
        variable.assign(variable * 10)
    tokens, _ = zoo.batch("bert_classes")
    features = {"tokens": tokens, "segments": (np.arange(12) < 7) * np.ones_like(tokens)}
    assert relative(model(features), model(tokens[:, :7])) < 1e-5
    types = (np.arange(12) >= 6) * np.ones_like(tokens)
    assert relative(model({"tokens": tokens, "types": types}), model(tokens)) > 0.01


def test_an_unknown_feature_fails_with_a_suggestion():
    with pytest.raises(tftpu.UserError, match="has no feature 'segment'"):
        models.build(zoo.TINY["llama"])({"tokens": np.ones((1, 3)), "segment": np.ones((1, 3))})


@pytest.mark.medium
@pytest.mark.parametrize("family", ["bert", "gpt", "llama"])
def test_a_batch_of_any_size_and_length_is_traced_once(family):
    """Keras traces so when `predict` gets batches of several sizes."""
    model = models.build(zoo.TINY[family])
    tokens, _ = zoo.batch(family)
    traced = tf.function(model, input_signature=[tf.TensorSpec((None, None), tf.int32)])
    assert relative(traced(tokens[:2, :5]).numpy(), model(tokens[:2, :5]).numpy()) < 1e-6
