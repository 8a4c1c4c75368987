"""Batches of a `keras.utils.PyDataset`."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines.data.arrays import unwrap_features
from tftpu.engines.engine import Epoch
from tftpu.errors import UserError
from tftpu.tensors import Nest


@dataclasses.dataclass(frozen=True)
class PyBatches:
    """Batches of a `keras.utils.PyDataset`, read by index, so that they start at any step.

    The trainer calls its `on_epoch_begin` and `on_epoch_end`. A resumed run does not call them for
    earlier epochs again.

    Attributes:
        dataset: the user's data set.
        shuffle: whether each epoch has its batches in another order.
        seed: the seed of the order.
        limit: the maximum number of batches that `iterate_once` returns; None for no limit.

    Raises:
        UserError: the data set has no batches, or uses processes instead of threads.
    """

    dataset: Any
    shuffle: bool = False
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.dataset.use_multiprocessing:
            raise UserError(
                f"{type(self.dataset).__name__} has use_multiprocessing=True, but no processes "
                "can be forked from one that trains: leave it out. workers=N starts threads "
                "instead."
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
        """True if the last batch of an epoch has another size."""
        return self.dataset.num_batches is not None and self._ends[0] != self._ends[1]

    @functools.cached_property
    def _ends(self) -> tuple[int, int]:
        """The sizes of the first and the last batch, both of which this reads."""
        last = self._batch(self.dataset.num_batches - 1)
        return _count_examples(self._first), _count_examples(last)

    def from_step(self, step: int) -> tf.data.Dataset:
        """Returns an endless data set from a step on; the last batch of an epoch may be smaller."""
        steps = self.dataset.num_batches
        return self._build_dataset(lambda: self._from(step, steps))

    def iterate_once(self) -> tf.data.Dataset:
        """Returns every batch once, in order; or the first ones, up to the limit.

        Raises:
            UserError: the data set never ends, and there is no limit.
        """
        counts = [n for n in (self.dataset.num_batches, self.limit) if n is not None]
        count = min(counts) if counts else self.epoch().steps
        batches = self._build_dataset(lambda: self._read(range(count)), sized=False)
        return batches.apply(tf.data.experimental.assert_cardinality(count))

    def take(self, batches: int) -> "PyBatches":
        """Returns the data set with `iterate_once` limited to the first batches."""
        return dataclasses.replace(self, limit=batches)

    def begin_epoch(self) -> None:
        """Tells the data set that an epoch begins."""
        self.dataset.on_epoch_begin()

    def end_epoch(self) -> None:
        """Tells the data set that an epoch has ended."""
        self.dataset.on_epoch_end()

    @functools.cached_property
    def _first(self) -> Nest:
        """The first batch."""
        return self._batch(0)

    def _build_dataset(
        self, generator: Callable[[], Iterator[Nest]], sized: bool = True
    ) -> tf.data.Dataset:
        """Returns a generator's batches as a data set; equal ones get a static size if `sized`."""

        def spec(array):
            size = array.shape[0] if sized and not self.ragged else None
            return tf.TensorSpec((size, *array.shape[1:]), array.dtype)

        signature = keras.tree.map_structure(spec, self._first)
        return tf.data.Dataset.from_generator(generator, output_signature=signature)

    def _from(self, step: int, steps: int | None) -> Iterator[Nest]:
        """Yields the batches from a step on, without end."""
        if steps is None:
            yield from self._read(itertools.count(step))
            return
        epoch, done = divmod(step, steps)
        while True:
            order = np.arange(steps)
            if self.shuffle:  # a smaller last batch stays the last one
                full = steps - self.ragged
                order[:full] = np.random.default_rng([self.seed, epoch]).permutation(full)
            yield from self._read(order[done:].tolist())
            epoch, done = epoch + 1, 0

    def _read(self, indices: Iterable[int]) -> Iterator[Nest]:
        """Yields batches in the order of their indices, read by the data set's `workers`."""
        if self.dataset.workers <= 1:
            yield from map(self._batch_like_first, indices)
            return
        with concurrent.futures.ThreadPoolExecutor(self.dataset.workers) as pool:
            waiting: collections.deque = collections.deque()
            for index in indices:
                waiting.append(pool.submit(self._batch_like_first, index))
                if len(waiting) > self.dataset.max_queue_size:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _batch_like_first(self, index: int) -> Nest:
        """Returns a batch; raises `UserError` if tf.data would round or wrap its numbers."""
        batch = self._batch(index)
        for array, first in zip(keras.tree.flatten(batch), keras.tree.flatten(self._first)):
            if not _can_become(array, first.dtype):
                raise UserError(
                    f"{type(self.dataset).__name__} returns an array of {array.dtype} in batch "
                    f"{index}, but of {first.dtype} in its first batch, which does not hold its "
                    "numbers: return the same dtype in every batch."
                )
        return batch

    def _batch(self, index: int) -> Nest:
        """Returns a batch as `x`, `(x, y)` or `(x, y, sample_weight)` of arrays."""
        batch = self.dataset[index]
        batch = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
        while batch and batch[-1] is None:
            batch = batch[:-1]
        if any(part is None for part in batch):
            raise UserError(
                f"{type(self.dataset).__name__} returns a batch with None before another part: "
                "return (x,), (x, y) or (x, y, sample_weight). A sample_weight needs y."
            )
        if len(batch) > 3:
            raise UserError(
                f"{type(self.dataset).__name__} returns batches of {len(batch)} parts: return (x, "
                "y) or (x, y, sample_weight)."
            )
        return unwrap_features(_as_arrays(batch))


@contextlib.contextmanager
def one_pass(dataset: Any, evaluates: bool = False) -> Iterator[None]:
    """Tells a `PyDataset` that an epoch begins and ends with the `with` block.

    Args:
        dataset: the data set that is read.
        evaluates: whether this is an evaluation; Keras calls `on_epoch_end` before it, too.
    """
    is_py_dataset = isinstance(dataset, PyBatches)
    if is_py_dataset and evaluates:
        dataset.end_epoch()
    if is_py_dataset:
        dataset.begin_epoch()
    yield
    if is_py_dataset:
        dataset.end_epoch()


def _as_arrays(part: Nest) -> Nest:
    """Returns nested arrays; lists become tuples, which tf.data needs."""
    if isinstance(part, list | tuple):
        return tuple(map(_as_arrays, part))
    if isinstance(part, dict):
        return {key: _as_arrays(value) for key, value in part.items()}
    return np.asarray(part)


def _count_examples(batch: Nest) -> int:
    return len(keras.tree.flatten(batch)[0])


def _can_become(array: np.ndarray, dtype: np.dtype) -> bool:
    """Returns whether a dtype of the same kind holds an array's numbers; floats may be rounded."""
    if array.dtype == dtype:
        return True
    are_whole = array.dtype.kind in "iu" and dtype.kind in "iu"
    alike = np.can_cast(array.dtype, dtype, "same_kind") or are_whole
    return alike and (not are_whole or np.array_equal(array.astype(dtype), array))
