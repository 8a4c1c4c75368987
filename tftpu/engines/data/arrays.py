"""Batches of arrays in memory, shuffled by a seed, that can start at any step."""

import dataclasses
import functools
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines.engine import Epoch
from tftpu.errors import UserError
from tftpu.tensors import Nest, Tensor

_ROUNDS = 8  # rounds of the Feistel network that permutes an epoch


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Batches of arrays whose first dimension counts the examples.

    An epoch is a permutation of the examples that depends on the seed and the number of the epoch
    only, so a resumed run sees the same batches. The arrays are copied when they are first read;
    later changes to them have no effect, as in Keras on TensorFlow.

    Attributes:
        parts: `(x,)`, `(x, y)` or `(x, y, sample_weight)` of nested NumPy arrays.
        global_batch_size: the number of examples per step.
        shuffle: whether each epoch has its own random order; otherwise it keeps the arrays' order.
        seed: the seed of the order.
    """

    parts: tuple[Nest, ...]
    global_batch_size: int
    shuffle: bool = False
    seed: int = 0

    @property
    def count(self) -> int:
        """The number of examples of an epoch."""
        return len(keras.tree.flatten(self.parts)[0])

    def epoch(self) -> Epoch:
        """Returns the number of batches in an epoch, and their sizes."""
        size = self.global_batch_size
        return Epoch(math.ceil(self.count / size), size, self.count % size or None)

    def starting_at(self, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
        """Returns an endless data set of complete batches from a step on.

        A batch may hold examples of two epochs.

        Args:
            step: the number of the first batch.
            host, hosts: the index of this host, and the number of hosts, which get consecutive
                parts of each batch.

        Raises:
            UserError: the number of hosts does not divide the batch.
        """
        if self.global_batch_size % hosts:
            raise UserError(
                f"A global batch of {self.global_batch_size} cannot be divided among {hosts} hosts."
            )
        shard = self.global_batch_size // hosts
        places = tf.range(shard, dtype=tf.int64) + host * shard
        examples = self._tensors
        return _count_steps(step).map(
            lambda step: self._gather(examples, step * self.global_batch_size + places),
            num_parallel_calls=2,
            deterministic=True,
        )

    def from_step(self, step: int) -> tf.data.Dataset:
        """Returns an endless data set from a step on; each epoch's last batch may be smaller."""
        count, size, epoch = self.count, self.global_batch_size, self.epoch()
        examples = self._tensors

        def batch(step):
            first = step % epoch.steps * size
            places = tf.range(first, tf.minimum(first + size, count))
            if epoch.last is None:
                places = tf.ensure_shape(places, (size,))
            return self._gather(examples, step // epoch.steps * count + places)

        return _count_steps(step).map(batch, num_parallel_calls=2, deterministic=True)

    def iterate_once(self) -> tf.data.Dataset:
        """Returns every example once, in the order of the arrays; the last batch may be smaller."""
        plain = dataclasses.replace(self, shuffle=False) if self.shuffle else self
        return plain.from_step(0).take(self.epoch().steps)

    def take(self, batches: int) -> tf.data.Dataset:
        """Returns the first batches of `iterate_once`."""
        return self.iterate_once().take(batches)

    @functools.cached_property
    def _tensors(self) -> Nest:
        with tf.device("CPU"):
            return keras.tree.map_structure(tf.constant, self.parts)

    def _gather(self, examples: Nest, positions: Tensor) -> Nest:
        """Returns the examples at `positions`, (n,) int64, in the endless sequence of epochs."""
        places = positions % self.count
        if self.shuffle:
            epochs = positions // self.count
            seed = tf.fill(tf.shape(positions), tf.constant(self.seed, tf.int64))
            # Each index has its own seed, because a batch may contain examples of two epochs.
            places = tf.raw_ops.RandomIndexShuffle(
                index=places,
                seed=tf.cast(tf.stack([seed, epochs, epochs], axis=1), tf.int32),
                max_index=tf.constant(self.count - 1, tf.int64),
                rounds=_ROUNDS,
            )
        batch: Any = keras.tree.map_structure(lambda array: tf.gather(array, places), examples)
        return unwrap_features(batch)


def as_arrays(
    x: Nest, y: Nest = None, sample_weight: Nest = None, *,
    batch_size: int, shuffle: bool = False, seed: int = 0,
) -> Arrays:  # fmt: skip
    """Returns arrays in memory as batches.

    Args:
        x, y, sample_weight: as for Keras's `fit`: arrays, tensors or pandas frames, or nests of
            them; None where there is none.
        batch_size: the number of examples per step; if there are fewer, all of them.
        shuffle: whether each epoch has another order.
        seed: the seed of the order.

    Raises:
        UserError: the arguments are not arrays of numbers, or have different lengths.
    """
    named = {"x": x, "y": y, "sample_weight": sample_weight}
    given = {name: _to_arrays(name, part) for name, part in named.items() if part is not None}
    if "sample_weight" in given and "y" not in given:
        raise UserError("sample_weight needs y, because without labels there is no loss to weigh.")
    lengths = {
        name: sorted({len(array) for array in keras.tree.flatten(part)})
        for name, part in given.items()
    }
    found = {length for several in lengths.values() for length in several}
    if len(found) != 1:
        held = ", ".join(f"{name} {' and '.join(map(str, n))}" for name, n in lengths.items())
        raise UserError(
            f"The arrays hold different numbers of examples ({held}): their first dimensions must "
            "be equal."
        )
    count = found.pop()
    if not count:
        raise UserError("The arrays hold no examples.")
    return Arrays(tuple(given.values()), min(batch_size, count), shuffle, seed)


def unwrap_features(batch: tuple[Nest, ...]) -> Nest:
    """Returns the features of a batch `(x,)` if they are not a tuple; otherwise the batch."""
    return batch[0] if len(batch) == 1 and not isinstance(batch[0], tuple) else batch


def _count_steps(first: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(first, tf.int64.max)


def _to_arrays(name: str, part: Nest) -> Nest:
    """Returns an argument as nested NumPy arrays; lists become tuples, which tf.data needs."""
    if isinstance(part, list | tuple):
        return tuple(_to_arrays(name, item) for item in part)
    if isinstance(part, dict):
        return {key: _to_arrays(f"{name}[{key!r}]", item) for key, item in part.items()}
    kind = type(part).__name__
    if not hasattr(part, "shape") or not hasattr(part, "__array__"):
        raise UserError(
            f"{name} holds a {kind}: pass NumPy arrays, pandas frames, a tf.data.Dataset or a "
            "keras.utils.PyDataset. Convert lists of numbers with np.array(...)."
        )
    try:
        array = np.asarray(part)
        if hasattr(part, "to_frame"):  # a pandas series becomes a column, as in Keras
            array = array[:, None]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"{name} holds a {kind}, which is not an array: {error}") from error
    if array.dtype.kind not in "biufV":  # NumPy gives bfloat16 the kind V
        advice = "convert it to numbers."
        if array.dtype.kind in "SU" or (array.size and isinstance(array.flat[0], str)):
            advice = (
                "convert it to numbers first. For a TextVectorization or a StringLookup, leave it "
                "out of the model, and apply it to the data: fit(vectorize(x), y), or "
                "dataset.map(lambda x, y: (vectorize(x), y)) of a tf.data.Dataset."
            )
        raise UserError(
            f"{name} is an array of {array.dtype}, which cannot be sent to a device: {advice}"
        )
    if array.ndim == 0:
        raise UserError(
            f"{name} is a single number, but it needs a first dimension that counts the examples."
        )
    return array
