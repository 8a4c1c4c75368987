"""Knowledge distillation: a small network learns from a frozen large one."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script

TEMPERATURE = 3.0


def network(filters):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(filters, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )


class Distiller(keras.Model):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = network(16), network(4)
        self.teacher.trainable = False

    def call(self, images):
        return self.student(images)


def loss(model, batch, training):
    images, labels = batch
    logits = model.student(images, training=training)
    teacher = ops.softmax(model.teacher(images, training=False) / TEMPERATURE)
    soft = keras.losses.kl_divergence(teacher, ops.softmax(logits / TEMPERATURE))
    hard = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return 0.1 * hard + 0.9 * TEMPERATURE**2 * soft, {"hard": hard, "soft": soft}


def model() -> keras.Model:
    net = Distiller()
    net.compile("adam")
    return net


SCRIPT = Script(model, (uniform(8, 8, 1), integers(0, 5)), loss_fn=loss)
