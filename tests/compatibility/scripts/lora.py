"""LoRA: low-rank updates of frozen layers."""

import keras
from keras import layers

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


def model() -> keras.Model:
    features = keras.Input((6, 12))
    x = layers.Dense(12, activation="gelu")(features)
    x = layers.EinsumDense("btc,cd->btd", (6, 8))(x)
    net = keras.Model(features, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    for layer in net.layers:
        if isinstance(layer, layers.Dense | layers.EinsumDense):
            layer.enable_lora(2)  # freezes the kernel
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.AdamW(1e-2, weight_decay=0.01), loss)
    return net


SCRIPT = Script(model, (normal(6, 12), integers(0, 4)))
