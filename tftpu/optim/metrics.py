"""Metrics that Keras lacks."""

import math
from typing import Any

import keras

from tftpu.tensors import Tensor, ops


@keras.saving.register_keras_serializable("tftpu")
class BitsPerToken(keras.metrics.SparseCategoricalCrossentropy):
    """The mean cross-entropy in bits per token; bits per byte if tokens are bytes.

    Args:
        name: the name of the metric.
        from_logits: whether predictions are logits rather than probabilities.
    """

    def __init__(self, name: str = "bits_per_token", from_logits: bool = True, **kwargs: Any):
        super().__init__(name=name, from_logits=from_logits, **kwargs)

    def result(self) -> Tensor:
        return ops.divide(super().result(), math.log(2))


@keras.saving.register_keras_serializable("tftpu")
class Accuracy(keras.metrics.MeanMetricWrapper):
    """The fraction of labels (one per example, or per token) whose class has the largest logit.

    Labels are class ids, or soft labels, whose most probable class counts as the label.

    Args:
        name: the name of the metric.
        dtype: the dtype of its state.
    """

    def __init__(self, name: str = "accuracy", dtype: Any = None):
        super().__init__(_mark_right, name=name, dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype}


def _mark_right(y_true: Tensor, y_pred: Tensor) -> Tensor:
    """Returns 1.0 where the prediction is right, else 0.0: (batch, ...)."""
    if len(y_true.shape) == len(y_pred.shape):
        y_true = ops.argmax(y_true, axis=-1)
    right = ops.equal(ops.cast(y_true, "int32"), ops.cast(ops.argmax(y_pred, axis=-1), "int32"))
    return ops.cast(right, keras.config.floatx())
