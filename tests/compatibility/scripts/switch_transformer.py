"""Mixture of experts: each word goes to one expert; the load is balanced over all devices."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import integers
from tests.compatibility.running import Script

EXPERTS, WIDTH = 3, 8


class Switch(layers.Layer):
    def __init__(self):
        super().__init__()
        self.router = layers.Dense(EXPERTS, activation="softmax")
        self.experts = [layers.Dense(WIDTH, activation="relu") for _ in range(EXPERTS)]

    def call(self, x):
        shares = self.router(x)  # (batch, time, experts)
        chosen = ops.one_hot(ops.argmax(shares, axis=-1), EXPERTS)
        outputs = ops.stack([expert(x) for expert in self.experts], axis=-1)
        gates = shares * chosen
        return ops.sum(outputs * gates[..., None, :], axis=-1), shares, chosen


class Classifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(20, WIDTH)
        self.switch, self.head = Switch(), layers.Dense(2)

    def call(self, words):
        x, shares, chosen = self.switch(self.embed(words))
        return self.head(ops.mean(x, axis=1)), shares, chosen


def loss(model, batch, training):
    words, labels = batch
    logits, shares, chosen = model(words, training=training)
    load = [ops.mean(tftpu.all_gather(part), axis=(0, 1)) for part in (shares, chosen)]
    balance = EXPERTS * ops.sum(load[0] * load[1])
    error = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return error + 1e-2 * balance


def model() -> keras.Model:
    net = Classifier()
    net.compile(keras.optimizers.Adam(1e-3))
    return net


SCRIPT = Script(model, (integers(0, 20, 6), integers(0, 2)), loss_fn=loss)
