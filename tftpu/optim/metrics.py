"""Metrics that Keras lacks."""

import math

import keras
from keras import ops


@keras.saving.register_keras_serializable("tftpu")
class BitsPerToken(keras.metrics.SparseCategoricalCrossentropy):
    """The cross-entropy in bits a token; bits per byte where a token is a byte."""

    def __init__(self, name: str = "bits_per_token", from_logits: bool = True, **kwargs):
        super().__init__(name=name, from_logits=from_logits, **kwargs)

    def result(self):
        return super().result() / math.log(2)


@keras.saving.register_keras_serializable("tftpu")
class Accuracy(keras.metrics.MeanMetricWrapper):
    """How often the largest logit is the label's; of a soft label its largest share counts."""

    def __init__(self, name: str = "accuracy", dtype=None):
        super().__init__(_right, name=name, dtype=dtype)

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype}


def _right(y_true, y_pred):
    """1.0 where the prediction is right: (batch, ...), for labels (batch, ...[, classes])."""
    if len(y_true.shape) == len(y_pred.shape):
        y_true = ops.argmax(y_true, axis=-1)
    right = ops.equal(ops.cast(y_true, "int32"), ops.cast(ops.argmax(y_pred, axis=-1), "int32"))
    return ops.cast(right, keras.config.floatx())
