"""Metric learning: anchors and positives, classified by their similarity in the batch."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import uniform
from tests.compatibility.running import Script


def loss(model, batch, training):
    anchors, positives = (ops.normalize(model(x, training=training), axis=-1) for x in batch)
    similarities = anchors @ ops.transpose(tftpu.all_gather(positives))
    return keras.losses.sparse_categorical_crossentropy(
        tftpu.positions(anchors), similarities / 0.2, from_logits=True
    )


def model() -> keras.Model:
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, activation="relu")(images)
    net = keras.Model(images, layers.Dense(8)(layers.GlobalAveragePooling2D()(x)))
    net.compile(keras.optimizers.Adam(1e-3))
    return net


SCRIPT = Script(model, (uniform(8, 8, 3), uniform(8, 8, 3, seed=1)), loss_fn=loss)
