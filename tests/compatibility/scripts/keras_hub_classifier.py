"""KerasHub's BERT classifier, built small."""

import keras

from tests.compatibility.data import integers, padded_tokens
from tests.compatibility.running import Script


def model() -> keras.Model:
    import keras_hub  # takes seconds

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=8,
        dropout=0.0,
    )
    net = keras_hub.models.BertTextClassifier(
        backbone=backbone, num_classes=3, preprocessor=None, dropout=0.0
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return net


TOKENS = padded_tokens(30, 8)
X = {
    "token_ids": TOKENS,
    "segment_ids": TOKENS * 0,
    "padding_mask": (TOKENS > 0).astype("int32"),
}
SCRIPT = Script(model, (X, integers(0, 3)), sparse=True)
