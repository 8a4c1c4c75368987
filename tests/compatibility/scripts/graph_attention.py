"""Graph attention: every node weighs its neighbours; a class for each node."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal, uniform
from tests.compatibility.running import Script

NODES, WIDTH = 6, 8


class GraphAttention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.project = layers.Dense(WIDTH, use_bias=False)
        self.sender, self.receiver = layers.Dense(1), layers.Dense(1)

    def call(self, nodes, edges):
        x = self.project(nodes)
        scores = self.receiver(x) + ops.transpose(self.sender(x), (0, 2, 1))
        scores = ops.where(edges > 0, ops.leaky_relu(scores, 0.2), -1e9)
        return ops.elu(ops.softmax(scores, axis=-1) @ x)


def model() -> keras.Model:
    nodes, edges = keras.Input((NODES, 4)), keras.Input((NODES, NODES))
    x = GraphAttention()(nodes, edges)
    net = keras.Model([nodes, edges], layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return net


EDGES = (uniform(NODES, NODES) < 0.5).astype("float32")
SCRIPT = Script(model, ((normal(NODES, 4), EDGES), integers(0, 3, NODES)))
