"""Batches of a Python iterable: generators, and loaders of other libraries.

Their length is unknown until they end, and most of them can only be read from their beginning.
"""

import collections
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import keras_internals
from tftpu.engines.data.arrays import unwrap_features
from tftpu.engines.data.batches import weigh
from tftpu.errors import OwnStepsNeeded, UserError
from tftpu.tensors import Nest


class ReadOnce:
    """An iterator over batches, such as a generator, which several passes read one after another.

    A pass begins with the batches that an earlier one read but did not use.

    Args:
        source: the iterator.

    Attributes:
        source: the iterator.
        used: the number of batches that were used: trained on, or thrown away.
    """

    def __init__(self, source: Iterable[Any]):
        self.source = source
        self.used = 0
        self._items = iter(source)  # once, as it may begin again
        self._unused: collections.deque[Any] = collections.deque()

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._unused)
        while (item := next(self._items, _END)) is not _END:
            self._unused.append(item)
            yield item

    def use(self) -> None:
        """Counts the first batch that was read and not used."""
        self._unused.popleft()
        self.used += 1


def read_once(data: Any, before: ReadOnce | None) -> ReadOnce | None:
    """Returns an iterator as a `ReadOnce`: `before`, if that has it; None for other data."""
    if not is_stream(data) or not hasattr(data, "__next__"):
        return None
    return before if before is not None and before.source is data else ReadOnce(data)


class Stream:
    """A Python iterable of batches, `(x,)`, `(x, y)` or `(x, y, sample_weight)`.

    Args:
        source: the iterable; an iterator can be read once.
        limit: the maximum number of batches of a pass; None for no limit.
        once: the iterator that the source reads, if it is not the source itself.
    """

    def __init__(
        self, source: Iterable[Any], limit: int | None = None, once: ReadOnce | None = None
    ):
        if isinstance(source, ReadOnce):
            once = source
        elif hasattr(source, "__next__"):
            source = once = ReadOnce(source)
        self._source = source
        self._once = once
        self._limit = limit
        self._class_weight: dict[int, float] = {}
        self._begun: tuple[Any, Iterator[Any]] | None = None

    @property
    def again(self) -> bool:
        """True if the source can be read again."""
        return self._once is None

    @property
    def kind(self) -> str:
        """The class name of the source, for messages."""
        return type(self._once.source if self._once is not None else self._source).__name__

    def weigh(self, class_weight: dict[int, float]) -> "Stream":
        """Returns the stream with a weight for each label, which becomes the sample weight."""
        weighed = copy.copy(self)
        weighed._class_weight = class_weight
        return weighed

    def _to_batch(self, item: Any) -> Nest:
        """Returns an item of the source as `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
        batch = _to_batch(item, self.kind)
        if not self._class_weight:
            return batch
        x, *labels = batch
        _, _, weight = weigh((x, *map(tf.convert_to_tensor, labels)), self._class_weight)
        return (*batch, weight.numpy())

    def take(self, batches: int) -> "Stream":
        """Returns the stream with passes of at most this number of batches."""
        taken = copy.copy(self)
        taken._limit = batches
        return taken

    @property
    def first(self) -> Nest:
        """The first batch of the next pass, which is read now and kept for the pass.

        Raises:
            UserError: the source has no further batch.
        """
        return self._to_batch(self._begin()[0])

    def _begin(self) -> tuple[Any, Iterator[Any]]:
        """Returns the first item of the next pass, and an iterator over those after it."""
        if self._begun is None:
            items = iter(self._source)
            found = next(items, None)
            if found is None:
                raise UserError(
                    f"The {self.kind} has no batches"
                    + (" left: it can be read only once." if not self.again else ".")
                )
            self._begun = found, items
        return self._begun

    @property
    def spec(self) -> Nest:
        """The specs of the first batch.

        Raises:
            OwnStepsNeeded: the batch has sparse or ragged tensors, or None for an optional input.
        """
        return describe_arrays(to_arrays(self.first))

    @property
    def symbols(self) -> Nest:
        """The first batch's specs as dense `keras.KerasTensor`s, also if it is sparse or ragged."""
        return keras.tree.map_structure(
            lambda part: (
                None
                if part is None
                else keras.KerasTensor(
                    tuple(part.shape), keras.backend.standardize_dtype(part.dtype)
                )
            ),
            self.first,
        )

    def iterate(
        self, position: int = 0, pass_steps: int | None = None, new: bool = True
    ) -> "Lookahead":
        """Returns an iterator over the batches of a pass, as the source gives them.

        Args:
            position: the number of earlier batches of the run; those of this pass are read and
                thrown away.
            pass_steps: the number of batches of a pass, if it is known.
            new: whether the batches follow those of the run; otherwise a source that can be read
                only once continues where it is.
        """
        first, rest = self._begin()
        self._begun = None
        use = self._once.use if self._once is not None else None
        found = Lookahead(self._to_batch(first), map(self._to_batch, rest), self._limit, use)
        if self.again and pass_steps is not None:
            position %= pass_steps
        if self.again or new:
            collections.deque(itertools.islice(found, self.count_unread(position)), maxlen=0)
        return found

    def count_unread(self, position: int) -> int:
        """Returns how many of the first `position` batches of a run are still to be read."""
        return max(0, position - (self._once.used if self._once is not None else 0))


class SlicedArrays(Stream):
    """Batches of texts or of arrays, also sparse or ragged ones, that can start at any step.

    Args:
        parts: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        batch_size: the number of examples of a batch.
        shuffle: whether each epoch has another order.
        seed: the seed of the order.
        take: a function from the indices of examples to their batch; None takes the examples from
            `parts`.

    Raises:
        UserError: the arrays hold different numbers of examples.
    """

    def __init__(
        self,
        parts: tuple[Nest, ...],
        batch_size: int,
        shuffle: bool,
        seed: int,
        take: Callable[[np.ndarray], Nest] | None = None,
    ):
        super().__init__(())
        self._take = take or keras_internals.build_slicer(parts)
        given = [part for part in keras.tree.flatten(parts) if part is not None]
        counts = {int(part.shape[0]) for part in given}
        if len(counts) > 1:
            raise UserError(
                f"The arrays hold {' and '.join(map(str, sorted(counts)))} examples: x, y and "
                "sample_weight must hold equally many."
            )
        self._count = counts.pop()
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed

    @property
    def kind(self) -> str:
        """The name of the source of the examples, for messages."""
        return "array"

    @property
    def steps(self) -> int:
        """The number of batches of an epoch."""
        return -(-self._count // self._batch_size)

    @property
    def first(self) -> Nest:
        """The first batch, in the order of the arrays."""
        return self._to_batch(self._take(np.arange(min(self._batch_size, self._count))))

    def iterate(
        self, position: int = 0, pass_steps: int | None = None, new: bool = True
    ) -> "Lookahead":
        """Returns an iterator over the rest of an epoch, after `position` batches of the run."""
        epoch, done = divmod(position, self.steps)
        order = np.arange(self._count)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._count)
        size = self._batch_size
        cuts = (order[start : start + size] for start in range(done * size, self._count, size))
        batches = (self._to_batch(self._take(cut)) for cut in cuts)
        return Lookahead(next(batches), batches, self._limit)


class Lookahead:
    """An iterator that can look ahead, to tell whether it has ended.

    Args:
        first: the first item.
        rest: the other items.
        limit: the number of items after which the iterator ends; None for no limit.
        use: a function that is called for each item that the iterator has yielded.
    """

    def __init__(
        self,
        first: Any,
        rest: Iterator[Any],
        limit: int | None = None,
        use: Callable[[], None] | None = None,
    ):
        self._next = [first]
        self._rest = rest
        self._left = limit
        self._use = use

    def __iter__(self) -> "Lookahead":
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        if self._use is not None:
            self._use()
        return self._next.pop()

    @property
    def ended(self) -> bool:
        """True if there is no further item; this reads the next one."""
        if self._left == 0:
            return True
        if not self._next:
            self._next += [item for item in [next(self._rest, _END)] if item is not _END]
        return not self._next

    def peek(self) -> Any:
        """Returns the next item without consuming it; None if there is none."""
        return None if self.ended else self._next[0]


_END = object()


def is_stream(data: Any) -> bool:
    """Returns whether data are an iterable of batches, but not arrays or a data set."""
    known = str | bytes | dict | list | tuple | tf.data.Dataset | keras.utils.PyDataset
    if isinstance(data, known) or hasattr(data, "shape") or isinstance(data, type):
        return False
    return hasattr(data, "__iter__") and not hasattr(data, "starting_at")


def has_unknown_length(dataset: Any) -> bool:
    """Returns whether tf.data does not know the number of batches of a data set."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    return bool(dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY)


def describe_arrays(batch: Nest) -> Nest:
    """Returns the specs of a batch of NumPy arrays."""
    return keras.tree.map_structure(_to_spec, batch)


def to_arrays(batch: Nest) -> Nest:
    """Returns a batch of a stream as NumPy arrays.

    Raises:
        OwnStepsNeeded: the batch has sparse or ragged tensors, or None for an optional input.
    """
    if any(keras_internals.is_sparse_or_ragged(part) for part in keras.tree.flatten(batch)):
        raise OwnStepsNeeded("The data have sparse or ragged tensors.")
    if any(part is None for part in keras.tree.flatten(batch)):
        raise OwnStepsNeeded("The data have None for an optional input.")
    return keras.tree.map_structure(_to_array, batch)


def _to_array(part: Any) -> np.ndarray:
    array = np.asarray(part.cpu() if keras_internals.is_torch_tensor(part) else part)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def _to_batch(found: Any, kind: str) -> Nest:
    """Converts an item of a source to a tuple, as `(x, y)`; lists in it become tuples."""
    batch = _to_tuples(found) if isinstance(found, list | tuple) else (found,)
    while batch and batch[-1] is None:
        batch = batch[:-1]
    if not 1 <= len(batch) <= 3:
        raise UserError(
            f"The {kind} yields batches of {len(batch)} parts: yield (x,), (x, y) or (x, y, "
            "sample_weight)."
        )
    return unwrap_features(batch)


def _to_tuples(part: Any) -> Any:
    if isinstance(part, list | tuple):
        return tuple(map(_to_tuples, part))
    if isinstance(part, dict):
        return {key: _to_tuples(value) for key, value in part.items()}
    return part


def _to_spec(array: np.ndarray) -> tf.TensorSpec:
    if array.ndim == 0:
        raise UserError("The data yield single numbers: yield batches of examples.")
    return tf.TensorSpec(array.shape, array.dtype)
