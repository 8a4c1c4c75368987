"""Cross-entropy over a large vocabulary without an array of all logits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from tftpu.tensors import Tensor, ops

CHUNK = 5632  # about how many classes have their logits in memory at a time
# The largest difference between a logit and the base, which is subtracted before exponentials: e^60
# times a million still fits into float32.
FAR = 60.0
LANES = 128  # lanes of a TPU; the size of a chunk is a multiple of this
SUBLANES = 16  # rows of a TPU's tile of 16-bit numbers
_NEVER = -1e30  # the logit of padding; it is finite, so that no difference is NaN


class Rows:
    """The placement of the rows of a matrix, (classes, width), on devices that compute a loss.

    In this class, one device has all rows. In a subclass, each device has a shard of the rows, and
    its own tokens.

    Attributes:
        count: the number of shards of the rows.
        shares_tokens: whether `gather_tokens` gives each device the tokens of all devices.
    """

    count = 1
    shares_tokens = True

    def gather_tokens(self, tokens: Tensor) -> Tensor:
        """Returns the tokens, (batch, ...), of all devices that share the rows, on each device."""
        return tokens

    def divide_tokens(self, tokens: Tensor) -> Tensor:
        """Returns gathered tokens, (batch, ...), each again only on the device it came from."""
        return tokens

    def shard(self, parts: Tensor) -> Tensor:
        """Returns a tensor, (count, ...), sharded along its first axis over the devices."""
        return parts


WHOLE = Rows()


class Chunked(NamedTuple):
    """Results of `chunked_crossentropy` for each token, (batch, time), float32.

    Attributes:
        values: the loss, with label smoothing.
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

    Both the forward and the backward pass compute the logits, one chunk of classes at a time. If
    nothing else reads the logits, no (batch, time, classes) tensor is in memory.

    Args:
        hidden: (batch, time, width), in the compute dtype.
        matrix: (classes, width).
        labels: class ids, (batch, time), int32.
        smoothing: see `SmoothedCrossentropy`.
        rows: the placement of the matrix's rows on devices.

    Returns:
        The results for each token. Only `values` has a gradient.
    """

    @ops.custom_gradient
    def loss(hidden, matrix):
        chunks, tokens = _Chunks(matrix, hidden.dtype, rows), rows.gather_tokens(hidden)
        known = rows.gather_tokens(labels)
        log_sum, true, everything, highest = _sum_over_classes(chunks, tokens, known, smoothing)
        plain = value = log_sum - true
        if smoothing:
            value = plain + smoothing * true - smoothing / matrix.shape[0] * everything

        def gradient(*upstreams):
            # JAX passes the gradients as one tuple, TensorFlow as separate arguments.
            upstream = rows.gather_tokens(keras.tree.flatten(upstreams)[0])
            d_hidden, d_matrix = _propagate(chunks, tokens, known, log_sum, upstream, smoothing)
            d_hidden = rows.divide_tokens(d_hidden)
            return ops.cast(d_hidden, hidden.dtype), ops.cast(d_matrix, matrix.dtype)

        correct = ops.cast(true >= highest, "float32")
        return tuple(map(rows.divide_tokens, (value, plain, correct))), gradient

    return Chunked(*loss(hidden, matrix))


class _Chunks:
    """The rows of a matrix in shards of several chunks; each shard computes one chunk at a time.

    Args:
        matrix: (classes, width).
        dtype: the compute dtype.
        rows: the placement of the rows on devices.

    Attributes:
        classes: the number of classes.
        count: the number of chunks of a shard.
        table: the matrix as (shards, rows of a shard, width), in the matrix's dtype.
        values: the chunks, (shards, count, rows of a chunk, width), in the compute dtype, with
            zeros that pad a shard.
    """

    def __init__(self, matrix: Tensor, dtype: Any, rows: Rows):
        self.rows, self.classes = rows, matrix.shape[0]
        self._own = self.classes // rows.count
        self.count, self._size = divide_classes(self.classes, rows.count)
        shape = rows.count, self._own, matrix.shape[1]
        self.table = rows.shard(ops.reshape(matrix, shape))
        padding = (0, self.count * self._size - self._own)
        padded = ops.pad(ops.reshape(ops.cast(matrix, dtype), shape), ((0, 0), padding, (0, 0)))
        chunks = rows.count, self.count, self._size, matrix.shape[1]
        self.values = rows.shard(ops.reshape(padded, chunks))

    def compute_logits(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Returns the logits of a chunk of each shard, (shards, batch, time, rows of a chunk)."""
        # Both have the compute dtype; products and sums are computed in float32.
        both = ops.cast(tokens, "float32"), ops.cast(self.values[:, index], "float32")
        found = ops.einsum("btw,pcw->pbtc", *both)
        inside = list_classes(index * self._size, self._size) < self._own
        return self.rows.shard(ops.where(inside, found, _NEVER))

    def mark_labels(self, labels: Tensor, index: Tensor) -> Tensor:
        """Returns which logits of `compute_logits` are those of the labels, bool of their shape."""
        first = index * self._size
        return _mark_labels(labels, self.rows.count, self._own, first, self._size)

    def join(self, values: Tensor) -> Tensor:
        """Returns the rows of the matrix, (classes, width), from chunks shaped like `values`."""
        width = values.shape[-1]
        parts = ops.reshape(values, (self.rows.count, self.count * self._size, width))
        return ops.reshape(parts[:, : self._own], (self.classes, width))


def _sum_over_classes(
    chunks: _Chunks, tokens: Tensor, labels: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the reductions over all classes for each token's loss, (batch, time) each.

    These are the logarithm of the sum of exponentials, the label's logit, the sum of all logits
    (0 without smoothing, because only smoothing needs it), and the largest logit.
    """
    rows = chunks.rows

    def add(index, base, total, true, everything, highest):
        some = chunks.compute_logits(tokens, index)
        is_true = chunks.mark_labels(labels, index)
        found = [ops.exp(some - base[..., None]), ops.where(is_true, some, 0.0)]
        if smoothing:
            found.append(ops.where(some > _NEVER, some, 0.0))
        sums = [ops.sum(part, axis=-1) for part in found]
        # A NaN logit never counts as far above the base; otherwise its chunk would repeat forever.
        largest = ops.max(some, axis=-1)
        far = ops.any(largest - base > FAR)
        raised = ops.where(far, ops.maximum(base, largest), base)
        total *= ops.exp(base - raised)
        state = [total, true, everything]
        state[: len(sums)] = [ops.where(far, s, s + part) for s, part in zip(state, sums)]
        state = [raised, *state, ops.maximum(highest, largest)]
        return index + ops.where(far, 0, 1), *map(rows.shard, state)

    # The exponentials are of the logits minus a base. The largest logit would be the best base, but
    # is not known yet. So the base is the label's logit, and a chunk whose logits are far above it
    # is repeated with a larger base.
    base = _compute_label_logits(tokens, chunks.table, labels)
    base = ops.broadcast_to(base, (rows.count, *base.shape))
    zeros = ops.zeros_like(base)
    start = base, zeros, zeros, zeros, zeros + _NEVER
    base, total, true, everything, highest = _run_loop(chunks.count, add, *map(rows.shard, start))
    top = ops.max(base, axis=0)
    log_sum = top + ops.log(ops.sum(total * ops.exp(base - top), axis=0))
    return log_sum, ops.sum(true, axis=0), ops.sum(everything, axis=0), ops.max(highest, axis=0)


def _propagate(
    chunks: _Chunks,
    tokens: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    upstream: Tensor,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients with respect to the tokens and to the matrix."""
    rows = chunks.rows

    def add(index, d_tokens, d_chunks):
        some = ops.exp(chunks.compute_logits(tokens, index) - log_sum[..., None])
        is_true = chunks.mark_labels(labels, index)
        some -= ops.where(is_true, 1.0 - smoothing, 0.0) + smoothing / chunks.classes
        some = ops.cast(some * upstream[..., None], tokens.dtype)
        d_some = ops.einsum("pbtc,pcw->pbtw", some, chunks.values[:, index])
        d_tokens = rows.shard(d_tokens + ops.cast(d_some, "float32"))
        d_chunk = ops.einsum("pbtc,btw->pcw", some, tokens)[:, None]
        d_chunks = ops.slice_update(d_chunks, (0, index, 0, 0), d_chunk)
        return index + 1, d_tokens, rows.shard(d_chunks)

    d_tokens = rows.shard(ops.zeros((rows.count, *tokens.shape), "float32"))
    found = _run_loop(chunks.count, add, d_tokens, ops.zeros_like(chunks.values))
    return ops.sum(found[0], axis=0), chunks.join(found[1])


def takes_tokens(rows: Rows, hidden: Tensor, classes: int) -> bool:
    """Returns whether `summed_crossentropy` is faster than `chunked_crossentropy`, and safe.

    In each iteration, the former reads and writes the gradient of a device's rows, the latter that
    of the tokens; the one with the smaller gradient is faster. The former is not used if one device
    has all rows (usually more than tokens), or in float16: its unscaled gradient may overflow.

    Args:
        rows: the placement of the matrix's rows on devices.
        hidden: (batch, time, width).
        classes: the number of classes.
    """
    divided = rows.shares_tokens and rows.count > 1
    if not divided or keras.backend.standardize_dtype(hidden.dtype) == "float16":
        return False
    batch, time, _ = hidden.shape
    # Even the smallest block of positions can have more logits than should be in memory.
    enough = choose_positions(time, classes) * classes <= 2 * time * CHUNK
    return enough and classes // rows.count < batch * time


def summed_crossentropy(
    hidden: Tensor,
    matrix: Tensor,
    labels: Tensor,
    weight: Tensor,
    smoothing: float,
    rows: Rows,
) -> tuple[Tensor, Chunked]:
    """Returns the weighted sum of the losses of `chunked_crossentropy`, and its results.

    The forward pass computes the logits of all classes for some tokens at a time, together with
    their gradient. The backward pass only scales this gradient and computes no logits again.

    Args:
        hidden, matrix, labels, smoothing, rows: as for `chunked_crossentropy`.
        weight: the factor of each token in the sum, (batch, time), float32; it has no gradient.

    Returns:
        The sum, (), float32; and the results for each token. Only the sum has a gradient.
    """
    classes, width = matrix.shape
    own, time = classes // rows.count, labels.shape[1]
    size = choose_positions(time, classes)
    count = math.ceil(time / size)

    def gather(tokens: Tensor) -> Tensor:
        padding = [(0, 0)] * len(tokens.shape)
        padding[1] = (0, count * size - time)
        return rows.gather_tokens(ops.pad(tokens, padding))

    def read(tokens: Tensor, index: Tensor) -> Tensor:
        shape = (tokens.shape[0], size, *tokens.shape[2:])
        return ops.slice(tokens, (0, index * size, *[0] * (len(shape) - 2)), shape)

    def write(tokens: Tensor, index: Tensor, part: Tensor) -> Tensor:
        return ops.slice_update(tokens, (0, index * size), part)

    @ops.custom_gradient
    def compute(hidden, matrix):
        table = ops.reshape(ops.cast(matrix, hidden.dtype), (rows.count, own, width))
        table = rows.shard(table)
        given = [gather(part) for part in (hidden, labels, weight)]

        def step(index, base, d_hidden, d_table, *results):
            some, known, factor = (read(part, index) for part in given)
            both = ops.cast(some, "float32"), ops.cast(table, "float32")
            logits = rows.shard(ops.einsum("btw,pcw->pbtc", *both))
            is_true = _mark_labels(known, rows.count, own, 0, own)
            found = _differentiate(logits, is_true, read(base, index), smoothing)
            d_logits = ops.where(found.far, 0.0, factor)[..., None] * found.d_logits
            d_logits = rows.shard(ops.cast(d_logits, hidden.dtype))
            d_some = ops.cast(ops.einsum("pbtc,pcw->pbtw", d_logits, table), "float32")
            d_hidden = ops.slice_update(d_hidden, (0, 0, index * size, 0), rows.shard(d_some))
            d_rows = ops.cast(ops.einsum("pbtc,btw->pcw", d_logits, some), "float32")
            return (
                index + ops.where(found.far, 0, 1),
                write(base, index, found.base),
                rows.shard(d_hidden),
                rows.shard(d_table + d_rows),
                *(write(old, index, new) for old, new in zip(results, found.results)),
            )

        base = _compute_label_logits(given[0], table, given[1])
        zeros = ops.zeros_like(base)
        d_hidden = ops.zeros((rows.count, *given[0].shape), "float32")
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


class _Differentiated(NamedTuple):
    """The loss of some tokens over all classes, and its gradient.

    Attributes:
        far: whether a logit is far above the base, () bool; then only `base` is valid.
        base: the value to subtract from the logits next, (batch, time); larger if `far`.
        results: see `Chunked`.
        d_logits: the gradient with respect to the logits, (shards, batch, time, rows).
    """

    far: Tensor
    base: Tensor
    results: Chunked
    d_logits: Tensor


def _differentiate(
    logits: Tensor, is_true: Tensor, base: Tensor, smoothing: float
) -> _Differentiated:
    """Returns the loss of some tokens, and its gradient.

    Args:
        logits: the logits of each shard's rows, (shards, batch, time, rows), float32.
        is_true: whether a logit is that of the label, bool of the same shape.
        base: the value subtracted from the logits in exponentials, (batch, time).
        smoothing: see `SmoothedCrossentropy`.
    """
    classes = logits.shape[0] * logits.shape[3]

    def over_classes(reduce: Callable, values: Tensor) -> Tensor:
        return reduce(reduce(values, axis=-1), axis=0)

    highest = over_classes(ops.max, logits)
    total = over_classes(ops.sum, ops.exp(logits - base[..., None]))
    true = over_classes(ops.sum, ops.where(is_true, logits, 0.0))
    # If `far`, the caller repeats these tokens with the raised base. NaN never counts as far.
    far = ops.any(highest - base > FAR)
    log_sum = base + ops.log(total)
    plain = value = log_sum - true
    if smoothing:
        everything = over_classes(ops.sum, logits)
        value = plain + smoothing * true - smoothing / classes * everything
    d_logits = ops.exp(logits - log_sum[..., None]) - smoothing / classes
    d_logits -= ops.where(is_true, 1.0 - smoothing, 0.0)
    correct = ops.cast(true >= highest, "float32")
    raised = ops.where(far, ops.maximum(base, highest), base)
    return _Differentiated(far, raised, Chunked(value, plain, correct), d_logits)


def choose_positions(time: int, classes: int) -> int:
    """Returns how many positions of each text `summed_crossentropy` computes at a time.

    It aims at twice as many logits at a time as `CHUNK` allows, because every iteration reads and
    writes the whole gradient. It returns the largest of the numbers with the least padding.
    """
    most = max(2 * time * CHUNK // classes, SUBLANES)
    sizes = range(SUBLANES, min(most, time) + 1, SUBLANES)
    return min(sizes, key=lambda size: (-time % size, -size), default=time)


def _mark_labels(labels: Tensor, parts: int, own: int, first: Tensor | int, count: int) -> Tensor:
    """Returns whether each class is a token's label, (parts, batch, time, count) bool.

    The classes are `count` from `first` on in each of `parts` shards, which have `own` each.
    """
    row = labels - own * ops.arange(parts, dtype="int32")[:, None, None]
    row = ops.where(row < own, row, -1)  # -1: otherwise a later shard's label could match padding
    return row[..., None] == list_classes(first, count)


def _compute_label_logits(hidden: Tensor, table: Tensor, labels: Tensor) -> Tensor:
    """Returns the logit of each label, (batch, time), float32; clips labels to valid classes.

    Each shard looks up its own rows, so devices exchange logits rather than rows.

    Args:
        hidden: (batch, time, width).
        table: (shards, rows, width).
        labels: class ids, (batch, time), int32.
    """
    parts, own, _ = table.shape
    labels = ops.clip(labels, 0, parts * own - 1)
    row = labels - own * ops.arange(parts, dtype="int32")[:, None, None]  # (parts, batch, time)
    inside = ops.logical_and(row >= 0, row < own)
    row = ops.clip(row, 0, own - 1)
    if parts == 1:  # on TensorFlow, take_along_axis would build an index for each element
        near = ops.take(table[0], row, axis=0)
    else:
        near = ops.take_along_axis(table, ops.reshape(row, (parts, -1, 1)), axis=1)
        near = ops.reshape(near, (parts, *hidden.shape))
    near = ops.cast(ops.cast(near, hidden.dtype), "float32")
    found = ops.sum(ops.cast(hidden, "float32") * near, axis=-1)
    return ops.sum(ops.where(inside, found, 0.0), axis=0)


def divide_classes(classes: int, parts: int) -> tuple[int, int]:
    """Returns the number of chunks in a shard of the classes, and the number of classes in a chunk.

    There are `parts` shards. One chunk of each is computed at a time, about `CHUNK` classes in all.
    """
    own = classes // parts
    size = math.ceil(own / math.ceil(classes / CHUNK) / LANES) * LANES
    return math.ceil(own / size), size


def _run_loop(count: int, body: Callable[..., tuple], *start: Tensor) -> tuple[Tensor, ...]:
    """Runs `body(index, *state)` in a loop on the device, until the index it returns is `count`.

    Without a loop, the compiler would process all chunks at the same time.

    Returns:
        The final state.
    """
    index = ops.zeros((), "int32")
    _, *state = ops.while_loop(lambda index, *_: index < count, body, (index, *start))
    return tuple(state)


def list_classes(first: Tensor | int, count: int) -> Tensor:
    """Returns the `count` class ids from `first` on: (count,), int32.

    A loss compares labels with them instead of gathering logits at the labels, because a TPU
    scatters the gradient of a gather row by row.
    """
    return first + ops.arange(count, dtype="int32")
