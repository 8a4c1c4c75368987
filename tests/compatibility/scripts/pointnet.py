"""PointNet: clouds of points, a learned rotation kept orthogonal by a regularizer."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


class Orthogonal(keras.regularizers.Regularizer):
    """The mean over a batch of rotations of their distance from orthogonal ones."""

    def __call__(self, x):
        x = ops.reshape(x, (-1, 3, 3))
        error = ops.square(x @ ops.transpose(x, (0, 2, 1)) - ops.eye(3))
        return 1e-3 * ops.sum(error)


def model() -> keras.Model:
    points = keras.Input((12, 3))
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(8, 1, activation="relu")(points))
    eye = keras.initializers.Constant([1.0, 0, 0, 0, 1, 0, 0, 0, 1])
    rotation = layers.Dense(
        9, bias_initializer=eye, activity_regularizer=Orthogonal(), kernel_initializer="zeros"
    )(x)
    x = layers.Dot(axes=(2, 1))([points, layers.Reshape((3, 3))(rotation)])
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(16, 1, activation="relu")(x))
    net = keras.Model(points, layers.Dense(4, activation="softmax")(x))
    net.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    return net


SCRIPT = Script(model, (normal(12, 3), integers(0, 4)))
