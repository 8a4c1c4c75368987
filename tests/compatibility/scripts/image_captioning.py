"""Image captions: a convolutional encoder, a decoder that attends to its features."""

import keras
from keras import layers

from tests.compatibility.data import padded_tokens, uniform
from tests.compatibility.running import Script

VOCABULARY, WIDTH = 20, 8


def model() -> keras.Model:
    images = keras.Input((8, 8, 3), name="image")
    words = keras.Input((6,), dtype="int32", name="words")
    seen = layers.Conv2D(WIDTH, 4, strides=4, activation="relu")(images)
    seen = layers.Reshape((4, WIDTH))(seen)
    x = layers.GRU(WIDTH, return_sequences=True)(layers.Embedding(VOCABULARY, WIDTH)(words))
    x = layers.LayerNormalization()(x + layers.Attention(use_scale=True)([x, seen]))
    net = keras.Model({"image": images, "words": words}, layers.Dense(VOCABULARY)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    net.compile(keras.optimizers.Adam(1e-3), loss)
    return net


WORDS = padded_tokens(VOCABULARY, 7)
X = {"image": uniform(8, 8, 3), "words": WORDS[:, :-1]}
SCRIPT = Script(model, (X, WORDS[:, 1:]), sparse=True)
