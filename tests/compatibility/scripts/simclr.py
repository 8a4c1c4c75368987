"""SimCLR: two views of an image among all views of the batch; an encoder and a projection."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import normal, uniform
from tests.compatibility.running import Script

TEMPERATURE = 0.1


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [layers.Conv2D(8, 3, strides=2, activation="relu"), layers.Flatten(), layers.Dense(8)]
        )
        self.projection = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(8)])

    def call(self, images):
        return ops.normalize(self.projection(self.encoder(images)), axis=-1)


def loss(model, batch, training):
    one, other = (model(view, training=training) for view in batch)
    everywhere = ops.transpose(tftpu.all_gather(other))
    back = ops.transpose(tftpu.all_gather(one))
    targets = tftpu.positions(one)
    rows = [one @ everywhere / TEMPERATURE, other @ back / TEMPERATURE]
    forth, back = (
        keras.losses.sparse_categorical_crossentropy(targets, row, from_logits=True) for row in rows
    )
    return 0.5 * (forth + back)


def model() -> keras.Model:
    net = Contrastive()
    net.compile(keras.optimizers.Adam(1e-3))
    return net


IMAGES = uniform(8, 8, 3)
VIEWS = IMAGES + 0.1 * normal(8, 8, 3), IMAGES + 0.1 * normal(8, 8, 3, seed=1)
SCRIPT = Script(model, VIEWS, loss_fn=loss, preflight=True)
