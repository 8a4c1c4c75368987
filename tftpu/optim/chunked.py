"""Cross-entropy over a large vocabulary without an array of all logits."""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras

from tftpu.tensors import Tensor, ops

CHUNK = 5632  # most classes whose logits are in memory at a time
# A logit this far above the base of the exponentials is too large: e^60 times a million still fits
# into float32.
FAR = 60.0
LANES = 128  # lanes of a TPU; a chunk is a multiple of them
SUBLANES = 16  # a TPU holds as many rows of 16-bit numbers together
_NEVER = -1e30  # the logit of padding; it is finite, so that no difference is NaN


class Rows:
    """The rows of a matrix, (classes, width), on the devices that compute a loss.

    Here one device has them all. In a subclass, each device has its part of the rows, and another
    part of the tokens.

    Attributes:
        count: the number of parts.
        shares_tokens: whether each device gets the tokens of all devices by `gather_tokens`.
    """

    count = 1
    shares_tokens = True

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

    def chunked(matrix: Tensor) -> Tensor:
        """Returns (parts, count, size, width), in the compute dtype, a part padded by zeros."""
        matrix = ops.reshape(ops.cast(matrix, hidden.dtype), (parts, own, width))
        matrix = ops.pad(matrix, ((0, 0), (0, count * size - own), (0, 0)))
        return rows.shard(ops.reshape(matrix, (parts, count, size, width)))

    def logits(hidden: Tensor, chunks: Tensor, index: Tensor) -> Tensor:
        """Returns (parts, batch, time, size), of a chunk of each part."""
        # Both have the compute dtype; products and sums are computed in float32.
        both = ops.cast(hidden, "float32"), ops.cast(chunks[:, index], "float32")
        found = ops.einsum("btw,pcw->pbtc", *both)
        return rows.shard(ops.where(list_classes(index * size, size) < own, found, _NEVER))

    def is_true(labels: Tensor, index: Tensor) -> Tensor:
        return _mark_labels(labels, parts, own, index * size, size)

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
        table = rows.shard(ops.reshape(matrix, (parts, own, width)))
        base = _compute_label_logits(gathered, table, known)
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


def takes_tokens(rows: Rows, hidden: Tensor, classes: int) -> bool:
    """Returns whether `summed_crossentropy` is better than `chunked_crossentropy`.

    Each adds up the gradient of a factor chunk by chunk in memory: of the rows of a device, or of
    the tokens. One part of the rows has all classes, mostly more than a device has tokens. Without
    the factor of the sum, gradients in float16 may overflow, whatever the loss scale.

    Args:
        rows: where the rows of the matrix are.
        hidden: (batch, time, width).
        classes: the number of classes.
    """
    divided = rows.shares_tokens and rows.count > 1
    if not divided or keras.backend.standardize_dtype(hidden.dtype) == "float16":
        return False
    batch, time, _ = hidden.shape
    enough = choose_positions(time, classes) * classes <= 2 * time * CHUNK  # logits in memory
    return enough and classes // rows.count < batch * time


def summed_crossentropy(
    hidden: Tensor,
    matrix: Tensor,
    labels: Tensor,
    weight: Tensor,
    smoothing: float,
    rows: Rows,
) -> tuple[Tensor, Chunked]:
    """Returns the weighted sum of `chunked_crossentropy`, and what that returns.

    It computes the logits of all classes for some tokens at a time, whose gradient is known then
    but for the factor of the sum. So the backward pass computes no logits again.

    Args:
        hidden, matrix, labels, smoothing, rows: as for `chunked_crossentropy`.
        weight: the factor of each token in the sum, (batch, time), float32; it has no gradient.

    Returns:
        The sum, (), which alone has a gradient; and the results for each token.
    """
    classes, width = matrix.shape
    parts, own = rows.count, classes // rows.count
    time = labels.shape[1]
    size = choose_positions(time, classes)
    count = math.ceil(time / size)

    def gather(tokens: Tensor) -> Tensor:
        padding = [(0, 0)] * len(tokens.shape)
        padding[1] = (0, count * size - time)
        return rows.gather_tokens(ops.pad(tokens, padding))

    @ops.custom_gradient
    def compute(hidden, matrix):
        table = rows.shard(ops.reshape(ops.cast(matrix, hidden.dtype), (parts, own, width)))
        given = [gather(part) for part in (hidden, labels, weight)]

        def read(tokens, index):
            shape = (tokens.shape[0], size, *tokens.shape[2:])
            return ops.slice(tokens, (0, index * size, *[0] * (len(shape) - 2)), shape)

        def write(tokens, index, part):
            return ops.slice_update(tokens, (0, index * size), part)

        def step(index, base, d_hidden, d_table, value, plain, correct):
            some, known, factor = (read(part, index) for part in given)
            low = read(base, index)
            both = ops.cast(some, "float32"), ops.cast(table, "float32")
            logits = rows.shard(ops.einsum("btw,pcw->pbtc", *both))
            is_true = _mark_labels(known, parts, own, 0, own)

            def over_classes(reduce: Callable, values: Tensor) -> Tensor:
                return reduce(reduce(values, axis=-1), axis=0)

            highest = over_classes(ops.max, logits)
            total = over_classes(ops.sum, ops.exp(logits - low[..., None]))
            true = over_classes(ops.sum, ops.where(is_true, logits, 0.0))
            # As in `chunked_crossentropy`: NaN is never far, and what is far is computed again.
            far = ops.any(highest - low > FAR)
            log_sum = low + ops.log(total)
            found = log_sum - true
            smoothed = found
            if smoothing:
                everything = over_classes(ops.sum, logits)
                smoothed = found + smoothing * true - smoothing / classes * everything
            d_logits = ops.exp(logits - log_sum[..., None]) - smoothing / classes
            d_logits -= ops.where(is_true, 1.0 - smoothing, 0.0)
            factor = ops.where(far, 0.0, factor)
            d_logits = rows.shard(ops.cast(d_logits * factor[..., None], hidden.dtype))
            d_some = ops.cast(ops.einsum("pbtc,pcw->pbtw", d_logits, table), "float32")
            d_hidden = ops.slice_update(d_hidden, (0, 0, index * size, 0), rows.shard(d_some))
            d_rows = ops.cast(ops.einsum("pbtc,btw->pcw", d_logits, some), "float32")
            return (
                index + ops.where(far, 0, 1),
                write(base, index, ops.where(far, ops.maximum(low, highest), low)),
                rows.shard(d_hidden),
                rows.shard(d_table + d_rows),
                write(value, index, smoothed),
                write(plain, index, found),
                write(correct, index, ops.cast(true >= highest, "float32")),
            )

        base = _compute_label_logits(given[0], table, given[1])
        zeros = ops.zeros_like(base)
        d_hidden = ops.zeros((parts, *given[0].shape), "float32")
        start = base, rows.shard(d_hidden), ops.zeros_like(table, "float32"), zeros, zeros, zeros
        _, d_hidden, d_table, *results = _run_loop(count, step, *start)
        d_hidden = rows.divide_tokens(ops.sum(d_hidden, axis=0)[:, :time])
        value, *others = (part[:, :time] for part in results)
        total = ops.sum(value * given[2][:, :time])

        def gradient(*upstreams):
            factor = keras.tree.flatten(upstreams)[0]
            d_matrix = ops.reshape(d_table * factor, (classes, width))
            return ops.cast(d_hidden * factor, hidden.dtype), ops.cast(d_matrix, matrix.dtype)

        return (total, *map(rows.divide_tokens, (value, *others))), gradient

    total, *results = compute(hidden, matrix)
    return total, Chunked(*results)


def choose_positions(time: int, classes: int) -> int:
    """Returns how many positions of each text `summed_crossentropy` takes at a time.

    Each chunk reads and writes the sum of the gradient, so there are half as many as `CHUNK` says,
    and as little padding behind the texts as can be.
    """
    most = max(2 * time * CHUNK // classes, SUBLANES)
    sizes = range(SUBLANES, min(most, time) + 1, SUBLANES)
    return min(sizes, key=lambda size: (-time % size, -size), default=time)


def _mark_labels(labels: Tensor, parts: int, own: int, first: Tensor | int, count: int) -> Tensor:
    """Returns which `count` rows of each part, of `own`, are the labels': (parts, ..., count)."""
    row = labels - own * ops.arange(parts, dtype="int32")[:, None, None]
    row = ops.where(row < own, row, -1)  # no label is at the padding behind a part
    return row[..., None] == list_classes(first, count)


def _compute_label_logits(hidden: Tensor, table: Tensor, labels: Tensor) -> Tensor:
    """Returns the logit of each label, (batch, time), float32; of no class, that of the nearest.

    Each part looks up its own rows, so that numbers are sent between devices, and not rows.

    Args:
        hidden: (batch, time, width).
        table: (parts, rows, width).
        labels: (batch, time).
    """
    parts, own, _ = table.shape
    labels = ops.clip(labels, 0, parts * own - 1)
    row = labels - own * ops.arange(parts, dtype="int32")[:, None, None]  # (parts, batch, time)
    inside = ops.logical_and(row >= 0, row < own)
    row = ops.clip(row, 0, own - 1)
    if parts == 1:  # Keras's other function makes an index of each number on TensorFlow
        near = ops.take(table[0], row, axis=0)
    else:
        near = ops.take_along_axis(table, ops.reshape(row, (parts, -1, 1)), axis=1)
        near = ops.reshape(near, (parts, *hidden.shape))
    near = ops.cast(ops.cast(near, hidden.dtype), "float32")
    found = ops.sum(ops.cast(hidden, "float32") * near, axis=-1)
    return ops.sum(ops.where(inside, found, 0.0), axis=0)


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


def list_classes(first: Tensor | int, count: int) -> Tensor:
    """Returns the `count` classes from `first` on: (count,), int32.

    Labels are compared with them instead of gathered by: a TPU scatters the gradient of a gather
    row by row.
    """
    return first + ops.arange(count, dtype="int32")
