"""Speech recognition: convolutions and a bidirectional GRU over a spectrogram, with CTC."""

import keras
from keras import layers

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


def model() -> keras.Model:
    spectrogram = keras.Input((24, 8))
    x = layers.Reshape((24, 8, 1))(spectrogram)
    x = layers.Conv2D(4, (5, 3), strides=(2, 2), padding="same", activation="relu")(x)
    x = layers.Reshape((12, 16))(x)
    x = layers.Bidirectional(layers.GRU(8, return_sequences=True))(x)
    net = keras.Model(spectrogram, layers.Dense(7)(x))
    net.compile("adam", keras.losses.CTC())
    return net


SCRIPT = Script(model, (normal(24, 8), integers(1, 7, 4)), preflight=True)
