"""Spoken words: a spectrogram computed in the model, then convolutions."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


class Spectrogram(layers.Layer):
    def call(self, sound):
        real, imaginary = ops.stft(sound, 16, 8, 16)
        return ops.log(ops.square(real) + ops.square(imaginary) + 1e-3)[..., None]


def model() -> keras.Model:
    sound = keras.Input((96,))
    x = layers.Conv2D(8, 3, activation="relu")(Spectrogram()(sound))
    x = layers.GlobalMaxPooling2D()(layers.MaxPooling2D()(x))
    net = keras.Model(sound, layers.Dense(6)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("adam", loss, metrics=["accuracy"])
    return net


SCRIPT = Script(model, (normal(96), integers(0, 6)))
