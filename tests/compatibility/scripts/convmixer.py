"""ConvMixer in the small: depthwise and pointwise convolutions with a residual."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 2, strides=2, activation="gelu")(images)
    mixed = layers.DepthwiseConv2D(3, padding="same", activation="gelu")(x)
    x = layers.Add()([x, layers.LayerNormalization()(mixed)])
    x = layers.LayerNormalization()(layers.Conv2D(8, 1, activation="gelu")(x))
    x = layers.GlobalAveragePooling2D()(x)
    net = keras.Model(images, layers.Dense(5, activation="softmax")(x))
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=1e-4, clipnorm=1.0)
    net.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (uniform(8, 8, 3), integers(0, 5)))
