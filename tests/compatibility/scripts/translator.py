"""Transformer translator: encoder, causal decoder, cross-attention, masked padding."""

import keras
from keras import layers

from tests.compatibility.data import padded_tokens
from tests.compatibility.running import Script

VOCABULARY, WIDTH = 20, 8


def attended(x, context, **options):
    found = layers.MultiHeadAttention(2, WIDTH // 2)(x, context, **options)
    return layers.LayerNormalization()(layers.Add()([x, found]))


def model() -> keras.Model:
    source = keras.Input((7,), dtype="int32", name="source")
    target = keras.Input((6,), dtype="int32", name="target")
    context = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(source)
    context = attended(context, context)
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(target)
    x = attended(x, x, use_causal_mask=True)
    x = attended(x, context)
    net = keras.Model({"source": source, "target": target}, layers.Dense(VOCABULARY)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    net.compile("rmsprop", loss)
    return net


SOURCE, TARGET = padded_tokens(VOCABULARY, 7), padded_tokens(VOCABULARY, 7, seed=4)
SCRIPT = Script(model, ({"source": SOURCE, "target": TARGET[:, :-1]}, TARGET[:, 1:]), sparse=True)
