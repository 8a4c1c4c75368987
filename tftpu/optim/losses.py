"""Losses that Keras lacks, written in `keras.ops`."""

from typing import Any

import keras

from tftpu.optim.chunked import list_classes
from tftpu.tensors import Tensor, ops


@keras.saving.register_keras_serializable("tftpu")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of labels and logits, with label smoothing (Szegedy et al. 2015).

    Follows https://arxiv.org/abs/1512.00567: the true class gets `1 - smoothing`, and all classes
    share `smoothing`. The mean is weighted by the sample weights. Keras smooths only one-hot
    labels, which are 50,000 times as large as class ids for a vocabulary of 50,000.

    Labels are class ids, integers of the logits' shape without the last dimension; or soft labels
    of the logits' shape, as MixUp makes them: probabilities of the classes, which sum to 1.

    Args:
        smoothing: between 0 and 1; 0 is plain cross-entropy.
        reduction: see `keras.losses.Loss`.
        name: the name of the loss.
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        reduction: str = "mean_with_sample_weight",
        name: str = "crossentropy",
        **kwargs: Any,
    ):
        super().__init__(name=name, reduction=reduction, **kwargs)
        self.smoothing = smoothing

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Returns the cross-entropy of each element, from its logits.

        Args:
            y_true: labels, (batch, ...) class ids or (batch, ..., classes) probabilities.
            y_pred: logits, (batch, ..., classes).

        Returns:
            (batch, ...), of the logits' dtype.
        """
        soft = len(y_true.shape) == len(y_pred.shape)
        labels = ops.cast(y_true, y_pred.dtype if soft else "int32")
        log_sum = ops.logsumexp(y_pred, axis=-1)  # (batch, ...)
        if soft:
            true = ops.sum(labels * y_pred, axis=-1)
        else:
            is_true = labels[..., None] == list_classes(0, y_pred.shape[-1])
            true = ops.sum(ops.where(is_true, y_pred, 0.0), axis=-1)
        if not self.smoothing:
            return log_sum - true
        mean = ops.mean(y_pred, axis=-1)
        return log_sum - (1.0 - self.smoothing) * true - self.smoothing * mean

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "smoothing": self.smoothing}
