"""Losses that Keras lacks."""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

CHUNK = 5632  # classes, at most, whose logits are in memory at a time
FAR = 60.0  # above the base of a sum of exponentials: e^60 times a million is a float32
LANES = 128  # of a TPU: a chunk is a multiple of it
_NEVER = -1e30  # a logit of no class: finite, so that no difference is NaN


@keras.saving.register_keras_serializable("tftpu")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of labels and logits, with label smoothing.

    Labels are class ids, integers of the logits' shape without the last dimension; or soft, as
    MixUp makes them: shares of the classes that add up to 1, of the logits' shape.

    Szegedy et al. 2015, https://arxiv.org/abs/1512.00567: the true class gets `1 - smoothing`, and
    `smoothing` is shared by all classes. Its mean is over the weight of the examples. Keras smooths
    one-hot labels only, which for a vocabulary of 50,000 are 50,000 times as large.

    Logits that know what they are the product of, by an attribute `tftpu_factors` (as those of the
    zoo's language models), and are of more than `CHUNK` classes, are worked out chunk by chunk, and
    again in the backward pass: nothing of (batch, time, classes) is made if no metric reads it.

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
        soft = len(y_true.shape) == len(y_pred.shape)
        labels = ops.cast(y_true, y_pred.dtype if soft else "int32")
        log_sum = ops.logsumexp(y_pred, axis=-1)  # (batch, ...)
        if soft:
            true = ops.sum(labels * y_pred, axis=-1)
        else:
            is_true = labels[..., None] == _class(0, y_pred.shape[-1])
            true = ops.sum(ops.where(is_true, y_pred, 0.0), axis=-1)
        if not self.smoothing:
            return log_sum - true
        mean = ops.mean(y_pred, axis=-1)
        return log_sum - (1.0 - self.smoothing) * true - self.smoothing * mean

    def call_factored(self, y_true, y_pred, hidden, matrix):
        if len(y_true.shape) == len(y_pred.shape) or matrix.shape[0] <= CHUNK:
            return self.call(y_true, y_pred)
        return chunked_crossentropy(hidden, matrix, ops.cast(y_true, "int32"), self.smoothing)

    def get_config(self):
        return {**super().get_config(), "smoothing": self.smoothing}


def chunked_crossentropy(hidden: Any, matrix: Any, labels: Any, smoothing: float = 0.0) -> Any:
    """Cross-entropy of the logits `hidden @ matrix.T`, which are never in memory as a whole.

    The backward pass computes them again, a chunk of classes at a time, as the forward pass does.

    Args:
        hidden: (batch, time, width), in the compute dtype.
        matrix: (classes, width).
        labels: (batch, time), int32.
        smoothing: as of `SmoothedCrossentropy`.

    Returns:
        (batch, time), float32.
    """
    classes, width = matrix.shape
    count = math.ceil(classes / CHUNK)
    size = math.ceil(classes / count / LANES) * LANES

    def rounded(factor):
        """To the compute dtype; products and sums of it are taken in float32."""
        return ops.cast(ops.cast(factor, hidden.dtype), "float32")

    def chunked(matrix):
        """(count, size, width), in the compute dtype; the last chunk is filled up with zeros."""
        matrix = ops.pad(ops.cast(matrix, hidden.dtype), ((0, count * size - classes), (0, 0)))
        return ops.reshape(matrix, (count, size, width))

    def logits(hidden, rows, start):
        found = ops.einsum("btw,cw->btc", rounded(hidden), rounded(rows))
        return ops.where(_class(start, size) < classes, found, _NEVER)

    @ops.custom_gradient
    def loss(hidden, matrix):
        chunks = chunked(matrix)

        def forward(index, base, total, true, everything):
            some = logits(hidden, chunks[index], index * size)
            is_true = labels[..., None] == _class(index * size, size)
            found = [ops.exp(some - base[..., None]), ops.where(is_true, some, 0.0)]
            if smoothing:
                found.append(ops.where(some > _NEVER, some, 0.0))
            sums = [ops.sum(part, axis=-1) for part in found]
            # NaN is not far above, so that no chunk is worked out for ever.
            largest = ops.max(some, axis=-1)
            far = ops.any(largest - base > FAR)
            raised = ops.where(far, ops.maximum(base, largest), base)
            total *= ops.exp(base - raised)
            state = [total, true, everything]
            state[: len(sums)] = [ops.where(far, s, s + part) for s, part in zip(state, sums)]
            return index + ops.where(far, 0, 1), raised, *state

        # Known beforehand, the largest logit would be the base of the exponentials; now it is the
        # true one. A chunk with logits far above that is worked out again, from those.
        near = ops.take(matrix, ops.clip(labels, 0, classes - 1), axis=0)  # (batch, time, width)
        base = ops.sum(rounded(hidden) * rounded(near), axis=-1)
        zeros = tf.zeros(labels.shape)
        base, total, true, everything = _loop(count, forward, base, zeros, zeros, zeros)
        log_sum = base + ops.log(total)
        value = log_sum - (1.0 - smoothing) * true - smoothing / classes * everything

        def gradient(upstream):
            def backward(index, of_hidden, of_chunks):
                some = ops.exp(logits(hidden, chunks[index], index * size) - log_sum[..., None])
                is_true = labels[..., None] == _class(index * size, size)
                some -= ops.where(is_true, 1.0 - smoothing, 0.0) + smoothing / classes
                some = ops.cast(some * upstream[..., None], hidden.dtype)  # (batch, time, size)
                of_hidden += ops.cast(ops.einsum("btc,cw->btw", some, chunks[index]), "float32")
                of_chunk = ops.einsum("btc,btw->cw", some, hidden)
                return index + 1, of_hidden, of_chunks.write(index, of_chunk)

            array = tf.TensorArray(hidden.dtype, count, element_shape=(size, width))
            zeros = tf.zeros(hidden.shape)
            of_hidden, of_chunks = _loop(count, backward, zeros, array)
            of_matrix = ops.reshape(of_chunks.stack(), (count * size, width))[:classes]
            return ops.cast(of_hidden, hidden.dtype), ops.cast(of_matrix, matrix.dtype)

        return value, gradient

    return loss(hidden, matrix)


def _loop(count: int, body: Callable, *start: Any) -> tuple:
    """What `body(index, *state)` makes of the state in a device loop, until the index is `count`.

    A loop, because a compiler that saw all chunks at once would work on them side by side.
    """
    done = tf.while_loop(
        lambda index, *_: index < count,
        body,
        (tf.constant(0), *start),
        parallel_iterations=1,
    )
    return done[1:]


def _class(first, count: int):
    """The classes that logits are of: (count,), int32.

    Labels are compared with them, not gathered by: a TPU scatters the gradient of a gather row by
    row.
    """
    return first + ops.arange(count, dtype="int32")
