"""Losses that Keras lacks."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("tftpu")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of labels and logits, with label smoothing.

    Labels are class ids, integers of the logits' shape without the last dimension; or soft, as
    MixUp makes them: shares of the classes that add up to 1, of the logits' shape.

    Szegedy et al. 2015, https://arxiv.org/abs/1512.00567: the true class gets `1 - smoothing`, and
    `smoothing` is shared by all classes. Its mean is over the weight of the examples. Keras smooths
    one-hot labels only, which for a vocabulary of 50,000 are 50,000 times as large.

    Args:
        smoothing: between 0 and 1; 0 is plain cross-entropy.
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        reduction: str = "mean_with_sample_weight",
        name: str = "crossentropy",
        **kwargs,
    ):
        super().__init__(name=name, reduction=reduction, **kwargs)
        self.smoothing = smoothing

    def call(self, y_true, y_pred):
        log_sum = ops.logsumexp(y_pred, axis=-1)  # (batch, ...)
        if len(y_true.shape) == len(y_pred.shape):
            true = ops.sum(ops.cast(y_true, y_pred.dtype) * y_pred, axis=-1)
        else:
            labels = ops.expand_dims(ops.cast(y_true, "int32"), -1)
            true = ops.squeeze(ops.take_along_axis(y_pred, labels, axis=-1), -1)
        if not self.smoothing:
            return log_sum - true
        mean = ops.mean(y_pred, axis=-1)
        return log_sum - (1.0 - self.smoothing) * true - self.smoothing * mean

    def get_config(self):
        return {**super().get_config(), "smoothing": self.smoothing}
