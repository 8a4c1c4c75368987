"""Object detection: focal loss of classes and smooth L1 loss of boxes at anchors."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal, uniform
from tests.compatibility.running import Script

ANCHORS, CLASSES = 9, 3


def loss(model, batch, training):
    images, classes, boxes = batch
    found = model(images, training=training)
    positive = ops.cast(classes > 0, "float32")
    targets = ops.one_hot(classes - 1, CLASSES)  # zeros for the background
    scores = ops.binary_crossentropy(targets, found["classes"], from_logits=True)
    chances = ops.sigmoid(found["classes"])
    wrong = targets * (1.0 - chances) + (1.0 - targets) * chances
    focal = ops.sum(ops.square(wrong) * scores, axis=-1)
    error = ops.abs(boxes - found["boxes"])
    smooth = ops.sum(ops.where(error < 1.0, 0.5 * ops.square(error), error - 0.5), axis=-1)
    count = ops.maximum(ops.sum(positive, axis=-1), 1.0)
    box = ops.sum(smooth * positive, axis=-1) / count
    score = ops.sum(focal, axis=-1) / count
    return box + score, {"box": box, "class": score}


def model() -> keras.Model:
    images = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 4, strides=4, activation="relu")(images)  # (batch, 3, 3, 8)
    outputs = {
        "classes": layers.Reshape((ANCHORS, CLASSES))(layers.Conv2D(CLASSES, 1)(x)),
        "boxes": layers.Reshape((ANCHORS, 4))(layers.Conv2D(4, 1)(x)),
    }
    net = keras.Model(images, outputs)
    net.compile(keras.optimizers.SGD(0.01, momentum=0.9))
    return net


DATA = uniform(12, 12, 3), integers(0, CLASSES + 1, ANCHORS), normal(ANCHORS, 4)
SCRIPT = Script(model, DATA, loss_fn=loss)
