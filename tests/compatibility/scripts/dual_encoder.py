"""Images and their captions: two encoders, with a learned temperature."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


class DualEncoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.image = keras.Sequential([layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(8)])
        self.text = keras.Sequential(
            [layers.Embedding(20, 8), layers.GlobalAveragePooling1D(), layers.Dense(8)]
        )
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs):
        image, text = self.image(inputs["image"]), self.text(inputs["caption"])
        return ops.normalize(image, axis=-1), ops.normalize(text, axis=-1)


def loss(model, batch, training):
    images, texts = model(batch, training=training)
    scale, targets = ops.exp(model.scale), tftpu.positions(images)
    logits = [
        scale * images @ ops.transpose(tftpu.all_gather(texts)),
        scale * texts @ ops.transpose(tftpu.all_gather(images)),
    ]
    each = [keras.ops.sparse_categorical_crossentropy(targets, x, True) for x in logits]
    return 0.5 * (each[0] + each[1]), {"to_text": each[0], "to_image": each[1]}


def model() -> keras.Model:
    net = DualEncoder()
    net.compile(keras.optimizers.AdamW(1e-3))
    return net


DATA = {"image": uniform(6, 6, 3), "caption": integers(0, 20, 7)}
SCRIPT = Script(model, DATA, loss_fn=loss)
