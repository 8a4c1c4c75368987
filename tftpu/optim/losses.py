"""Losses that Keras lacks, written in `keras.ops`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from tftpu.tensors import Tensor, ops

CHUNK = 5632  # most classes whose logits are in memory at a time
# A logit this far above the base of the exponentials is too large: e^60 times a million still fits
# into float32.
FAR = 60.0
LANES = 128  # lanes of a TPU; a chunk is a multiple of them
_NEVER = -1e30  # the logit of padding; it is finite, so that no difference is NaN


@keras.saving.register_keras_serializable("tftpu")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of labels and logits, with label smoothing (Szegedy et al. 2015).

    Follows https://arxiv.org/abs/1512.00567: the true class gets `1 - smoothing`, and all classes
    share `smoothing`. Its mean is weighted by the examples' weights. Keras smooths one-hot labels
    only, which for a vocabulary of 50,000 are 50,000 times as large as class ids.

    Labels are class ids, integers of the logits' shape without the last dimension; or soft labels
    of the logits' shape, as MixUp makes them: shares of the classes that sum to 1.

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
            y_true: labels, (batch, ...) integers or (batch, ..., classes) shares.
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
            is_true = labels[..., None] == _list_classes(0, y_pred.shape[-1])
            true = ops.sum(ops.where(is_true, y_pred, 0.0), axis=-1)
        if not self.smoothing:
            return log_sum - true
        mean = ops.mean(y_pred, axis=-1)
        return log_sum - (1.0 - self.smoothing) * true - self.smoothing * mean

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "smoothing": self.smoothing}


class Rows:
    """The rows of a matrix, (classes, width), on the devices that compute a loss.

    Here one device has them all. In a subclass, each device has its part of the rows, and another
    part of the tokens.

    Attributes:
        count: the number of parts.
    """

    count = 1

    def gather_tokens(self, tokens: Tensor) -> Tensor:
        """Returns the tokens, (batch, ...), of all devices that have parts."""
        return tokens

    def divide_tokens(self, tokens: Tensor) -> Tensor:
        """Returns the same tokens, each on the device that it came from."""
        return tokens

    def shard(self, parts: Tensor) -> Tensor:
        """Returns a tensor, (count, ...), of which each device computes its part."""
        return parts


WHOLE = Rows()


class Chunked(NamedTuple):
    """Results of `chunked_crossentropy` for each token, (batch, time), float32.

    Attributes:
        values: the loss.
        crossentropy: the loss without label smoothing.
        correct: 1.0 where no class has a larger logit than the label, else 0.0.
    """

    values: Tensor
    crossentropy: Tensor
    correct: Tensor


def chunked_crossentropy(
    hidden: Tensor,
    matrix: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    rows: Rows = WHOLE,
) -> Chunked:
    """Returns the cross-entropy of the logits `hidden @ matrix.T` without storing all logits.

    Forward and backward pass both compute the logits, one chunk of classes at a time. If nothing
    else reads the logits, no (batch, time, classes) tensor is held in memory.

    Args:
        hidden: (batch, time, width), in the compute dtype.
        matrix: (classes, width).
        labels: (batch, time), int32.
        smoothing: see `SmoothedCrossentropy`.
        rows: where the rows of the matrix are.

    Returns:
        Only `values` has a gradient.
    """
    classes, width = matrix.shape
    parts = rows.count
    own = classes // parts  # rows of a part
    count, size = divide_classes(classes, parts)

    def rounded(factor: Tensor) -> Tensor:
        """Rounds to the compute dtype; products and sums are computed in float32."""
        return ops.cast(ops.cast(factor, hidden.dtype), "float32")

    def chunked(matrix: Tensor) -> Tensor:
        """Returns (parts, count, size, width), in the compute dtype, a part padded by zeros."""
        matrix = ops.reshape(ops.cast(matrix, hidden.dtype), (parts, own, width))
        matrix = ops.pad(matrix, ((0, 0), (0, count * size - own), (0, 0)))
        return rows.shard(ops.reshape(matrix, (parts, count, size, width)))

    def logits(hidden: Tensor, chunks: Tensor, index: Tensor) -> Tensor:
        """Returns (parts, batch, time, size), of a chunk of each part."""
        found = ops.einsum("btw,pcw->pbtc", rounded(hidden), rounded(chunks[:, index]))
        return rows.shard(ops.where(_list_classes(index * size, size) < own, found, _NEVER))

    def is_true(labels: Tensor, index: Tensor) -> Tensor:
        """Returns which classes of a chunk of each part are the labels."""
        row = labels - own * ops.arange(parts, dtype="int32")[:, None, None]
        row = ops.where(row < own, row, -1)  # no label is at the padding behind a part
        return row[..., None] == _list_classes(index * size, size)

    @ops.custom_gradient
    def loss(hidden, matrix):
        chunks, gathered = chunked(matrix), rows.gather_tokens(hidden)
        known = rows.gather_tokens(labels)

        def forward(index, base, total, true, everything, highest):
            some = logits(gathered, chunks, index)
            found = [ops.exp(some - base[..., None]), ops.where(is_true(known, index), some, 0.0)]
            if smoothing:
                found.append(ops.where(some > _NEVER, some, 0.0))
            sums = [ops.sum(part, axis=-1) for part in found]
            # NaN is never far above the base, so no chunk is repeated forever.
            largest = ops.max(some, axis=-1)
            far = ops.any(largest - base > FAR)
            raised = ops.where(far, ops.maximum(base, largest), base)
            total *= ops.exp(base - raised)
            state = [total, true, everything]
            state[: len(sums)] = [ops.where(far, s, s + part) for s, part in zip(state, sums)]
            state = [raised, *state, ops.maximum(highest, largest)]
            return index + ops.where(far, 0, 1), *map(rows.shard, state)

        # The largest logit would be the best base of the exponentials, but is not known yet. So the
        # base is the label's logit, and a chunk whose logits are far above it is repeated with a
        # larger base.
        near = ops.take(matrix, ops.clip(known, 0, classes - 1), axis=0)  # (batch, time, width)
        base = ops.sum(rounded(gathered) * rounded(near), axis=-1)
        base = ops.broadcast_to(base, (parts, *base.shape))
        zeros = ops.zeros_like(base)
        start = base, zeros, zeros, zeros, zeros + _NEVER
        base, total, true, everything, highest = _run_loop(count, forward, *map(rows.shard, start))
        top = ops.max(base, axis=0)
        log_sum = top + ops.log(ops.sum(total * ops.exp(base - top), axis=0))
        true, everything = ops.sum(true, axis=0), ops.sum(everything, axis=0)
        highest = ops.max(highest, axis=0)
        plain = log_sum - true
        value = plain + smoothing * true - smoothing / classes * everything if smoothing else plain

        def gradient(*upstreams):
            # JAX gives one tuple, TensorFlow each upstream.
            upstream = rows.gather_tokens(keras.tree.flatten(upstreams)[0])

            def backward(index, d_hidden, d_chunks):
                some = ops.exp(logits(gathered, chunks, index) - log_sum[..., None])
                some -= ops.where(is_true(known, index), 1.0 - smoothing, 0.0) + smoothing / classes
                some = ops.cast(some * upstream[..., None], hidden.dtype)
                d_some = ops.einsum("pbtc,pcw->pbtw", some, chunks[:, index])
                d_hidden = rows.shard(d_hidden + ops.cast(d_some, "float32"))
                d_chunk = ops.einsum("pbtc,btw->pcw", some, gathered)[:, None]
                d_chunks = ops.slice_update(d_chunks, (0, index, 0, 0), d_chunk)
                return index + 1, d_hidden, rows.shard(d_chunks)

            d_hidden = rows.shard(ops.zeros((parts, *gathered.shape), "float32"))
            start = d_hidden, ops.zeros_like(chunks)
            d_hidden, d_chunks = _run_loop(count, backward, *start)
            d_hidden = rows.divide_tokens(ops.sum(d_hidden, axis=0))
            d_matrix = ops.reshape(d_chunks, (parts, count * size, width))[:, :own]
            d_matrix = ops.reshape(d_matrix, (classes, width))
            return ops.cast(d_hidden, hidden.dtype), ops.cast(d_matrix, matrix.dtype)

        correct = ops.cast(true >= highest, "float32")
        return tuple(map(rows.divide_tokens, (value, plain, correct))), gradient

    return Chunked(*loss(hidden, matrix))


def divide_classes(classes: int, parts: int) -> tuple[int, int]:
    """Returns the number of chunks of each part of the classes, and the classes of a chunk.

    The chunks of all parts have about `CHUNK` classes together, and each has one of its part's.
    """
    own = classes // parts
    size = math.ceil(own / math.ceil(classes / CHUNK) / LANES) * LANES
    return math.ceil(own / size), size


def _run_loop(count: int, body: Callable[..., tuple], *start: Tensor) -> tuple[Tensor, ...]:
    """Runs `body(index, *state)` in a device loop until the index it returns is `count`.

    It is a loop because the compiler would otherwise process all chunks at the same time.

    Returns:
        The last state.
    """
    index = ops.zeros((), "int32")
    _, *state = ops.while_loop(lambda index, *_: index < count, body, (index, *start))
    return tuple(state)


def _list_classes(first: Tensor | int, count: int) -> Tensor:
    """Returns the `count` classes from `first` on: (count,), int32.

    Labels are compared with them instead of gathered by: a TPU scatters the gradient of a gather
    row by row.
    """
    return first + ops.arange(count, dtype="int32")
