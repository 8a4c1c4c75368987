"""Vision transformer: patches, a class token, one encoder block."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script

WIDTH, PATCHES = 16, 9


class ClassToken(layers.Layer):
    """Puts a trained token before the patches, and adds the positions."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, WIDTH), initializer="normal")
        self.positions = self.add_weight(shape=(1, PATCHES + 1, WIDTH), initializer="normal")

    def call(self, x):
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, WIDTH))
        return ops.concatenate([token, x], axis=1) + self.positions


def model() -> keras.Model:
    images = keras.Input((12, 12, 3))
    x = layers.Conv2D(WIDTH, 4, strides=4)(images)
    x = ClassToken()(layers.Reshape((PATCHES, WIDTH))(x))
    normed = layers.LayerNormalization(epsilon=1e-6)(x)
    x = x + layers.MultiHeadAttention(2, 8, dropout=0.0)(normed, normed)
    hidden = layers.Dense(32, "gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
    x = x + layers.Dense(WIDTH)(hidden)
    net = keras.Model(images, layers.Dense(10)(x[:, 0]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.AdamW(1e-3, weight_decay=1e-4), loss, metrics=["accuracy"])
    return net


SCRIPT = Script(model, (uniform(12, 12, 3), integers(0, 10)), preflight=True)
