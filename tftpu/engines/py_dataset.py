"""A `keras.utils.PyDataset` as batches."""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines.arrays import alone
from tftpu.engines.engine import Epoch
from tftpu.errors import UserError
from tftpu.tensors import Nest


@dataclasses.dataclass(frozen=True)
class PyBatches:
    """Batches of a `keras.utils.PyDataset`, read by index, so that they start at any step.

    Its `on_epoch_begin` and `on_epoch_end` are called; what they change is not replayed by a
    resumed run.

    Attributes:
        dataset: of the user.
        shuffle: whether each epoch has its batches in another order.
        seed: of the order.

    Raises:
        UserError: no batches, or processes instead of threads.
    """

    dataset: Any
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset.use_multiprocessing:
            raise UserError(
                f"{type(self.dataset).__name__} has use_multiprocessing=True, and processes cannot "
                "be forked from one that trains: leave it out. workers=N are threads."
            )
        if self.dataset.num_batches == 0:
            raise UserError(f"{type(self.dataset).__name__} has no batches.")

    def epoch(self) -> Epoch:
        """Returns the length of an epoch.

        Raises:
            UserError: the data set never ends.
        """
        steps = self.dataset.num_batches
        if steps is None:
            raise UserError(
                f"{type(self.dataset).__name__} never ends (num_batches is None): pass "
                "steps_per_epoch= with epochs=, or steps=."
            )
        first, last = self._ends
        return Epoch(steps, first, last if last != first else None)

    @property
    def ragged(self) -> bool:
        """True if the last batch of an epoch is smaller."""
        return self.dataset.num_batches is not None and self.epoch().last is not None

    @functools.cached_property
    def _ends(self) -> tuple[int, int]:
        """The sizes of the first batch and of the last, which are read."""
        return _examples(self._batch(0)), _examples(self._batch(self.dataset.num_batches - 1))

    def from_step(self, step: int) -> tf.data.Dataset:
        """Returns an endless data set from a step on; the last batch of an epoch may be smaller."""
        first, steps = self._batch(0), self.dataset.num_batches

        def spec(array):
            size = None if self.ragged else array.shape[0]
            return tf.TensorSpec((size, *array.shape[1:]), array.dtype)

        signature = keras.tree.map_structure(spec, first)
        batches = tf.data.Dataset.from_generator(
            lambda: self._from(step, steps), output_signature=signature
        )
        return batches.prefetch(tf.data.AUTOTUNE)

    def once(self) -> tf.data.Dataset:
        """Returns every batch once, in order."""
        return dataclasses.replace(self, shuffle=False).from_step(0).take(self.epoch().steps)

    def _from(self, step: int, steps: int | None) -> Iterator[Nest]:
        """Yields the batches from a step on, without end."""
        if steps is None:
            yield from self._read(itertools.count(step))
            return
        epoch, done = divmod(step, steps)
        while True:
            order = np.arange(steps)
            if self.shuffle:  # a smaller batch stays the last one
                full = steps - self.ragged
                order[:full] = np.random.default_rng([self.seed, epoch]).permutation(full)
            self.dataset.on_epoch_begin()
            yield from self._read(order[done:].tolist())
            self.dataset.on_epoch_end()
            epoch, done = epoch + 1, 0

    def _read(self, indices: Iterable[int]) -> Iterator[Nest]:
        """Yields batches in the order of their indices, read by the data set's `workers`."""
        if self.dataset.workers <= 1:
            yield from map(self._batch, indices)
            return
        with concurrent.futures.ThreadPoolExecutor(self.dataset.workers) as pool:
            waiting: collections.deque = collections.deque()
            for index in indices:
                waiting.append(pool.submit(self._batch, index))
                if len(waiting) > self.dataset.max_queue_size:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _batch(self, index: int) -> Nest:
        """Returns a batch as `x`, `(x, y)` or `(x, y, sample_weight)` of arrays."""
        batch = self.dataset[index]
        batch = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
        batch = tuple(part for part in batch if part is not None)
        if len(batch) > 3:
            raise UserError(
                f"{type(self.dataset).__name__} returns {len(batch)} parts a batch: return "
                "(x, y) or (x, y, sample_weight)."
            )
        return alone(_as_arrays(batch))


def _as_arrays(part: Nest) -> Nest:
    """Returns nested arrays; lists become tuples, as tf.data wants them."""
    if isinstance(part, list | tuple):
        return tuple(map(_as_arrays, part))
    if isinstance(part, dict):
        return {key: _as_arrays(value) for key, value in part.items()}
    return np.asarray(part)


def _examples(batch: Nest) -> int:
    return len(keras.tree.flatten(batch)[0])
