"""Next frame of a video by convolutional LSTMs."""

import keras
from keras import layers

from tests.compatibility.data import uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    frames = keras.Input((4, 6, 6, 1))
    x = layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True)(frames)
    x = layers.LayerNormalization()(x)
    net = keras.Model(frames, layers.Conv3D(1, 3, padding="same", activation="sigmoid")(x))
    net.compile("adam", "binary_crossentropy")
    return net


VIDEOS = uniform(5, 6, 6, 1)
SCRIPT = Script(model, (VIDEOS[:, :-1], VIDEOS[:, 1:]), preflight=True)
