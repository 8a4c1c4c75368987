"""KerasHub's GPT-2 language model, built small, with weights for padding."""

import keras

from tests.compatibility.data import padded_tokens
from tests.compatibility.running import Script


def model() -> keras.Model:
    import keras_hub  # takes seconds

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=30,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=8,
        dropout=0.0,
    )
    net = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(1e-3), loss, weighted_metrics=["accuracy"])
    return net


ROWS = padded_tokens(30, 9)
X = {"token_ids": ROWS[:, :-1], "padding_mask": (ROWS[:, :-1] > 0).astype("int32")}
WEIGHTS = (ROWS[:, 1:] > 0).astype("float32")
SCRIPT = Script(model, (X, ROWS[:, 1:], WEIGHTS), sparse=True)
