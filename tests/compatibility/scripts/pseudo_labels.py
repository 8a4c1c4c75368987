"""Semi-supervised: confident predictions for weakly changed images label the strongly changed."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal, uniform
from tests.compatibility.running import Script


def loss(model, batch, training):
    images, labels, weak, strong = batch
    known = keras.losses.sparse_categorical_crossentropy(
        labels, model(images, training=training), from_logits=True
    )
    chances = ops.stop_gradient(ops.softmax(model(weak, training=training)))
    sure = ops.cast(ops.max(chances, axis=-1) > 0.3, "float32")
    guessed = keras.losses.sparse_categorical_crossentropy(
        ops.argmax(chances, axis=-1), model(strong, training=training), from_logits=True
    )
    return known + sure * guessed, {"sure": sure}


def model() -> keras.Model:
    net = keras.Sequential(
        [keras.Input((6, 6, 1)), layers.Flatten(), layers.Dense(16, "relu"), layers.Dense(4)]
    )
    net.compile(keras.optimizers.Adam(1e-3))
    return net


OTHERS = uniform(6, 6, 1, seed=1)
DATA = uniform(6, 6, 1), integers(0, 4), OTHERS, OTHERS + 0.3 * normal(6, 6, 1)
SCRIPT = Script(model, DATA, loss_fn=loss)
