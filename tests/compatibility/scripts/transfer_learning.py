"""Transfer learning: MobileNet of keras.applications, frozen, under a new head."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    base = keras.applications.MobileNet(
        input_shape=(32, 32, 3), alpha=0.25, include_top=False, weights=None
    )
    base.trainable = False
    images = keras.Input((32, 32, 3))
    x = base(layers.Rescaling(2.0, -1.0)(images), training=False)
    net = keras.Model(images, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
    return net


SCRIPT = Script(model, (uniform(32, 32, 3), integers(0, 5)))
