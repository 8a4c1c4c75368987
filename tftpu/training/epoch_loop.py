"""Train loops over epochs that may end with a smaller batch, and over streams.

The batches of streams may have any size, and streams may end at any time.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tftpu.engines.data import conversion
from tftpu.engines.data.arrays import Arrays
from tftpu.engines.data.conversion import find_gate
from tftpu.engines.data.gate import Gate
from tftpu.engines.data.py_dataset import PyBatches
from tftpu.engines.data.streams import Lookahead, SlicedArrays, Stream, to_arrays
from tftpu.engines.engine import Dataset, Epoch, LoopResult, TrainLoop, TrainSumsLayout
from tftpu.engines.objectives.losses import count_examples
from tftpu.tensors import Nest
from tftpu.training import batch_values

_log = logging.getLogger(__name__)

_DIAGNOSIS = 20.0  # maximum seconds of reading batches again after a loss that is not finite


class EpochBatches:
    """An iterator that `Engine.batches` returned, with its position.

    Args:
        batches: the iterator.
        position: the number of batches of the run before the first one.
        epoch: the length of one pass over the data.

    Attributes:
        batches: the iterator.
        left: the number of batches that are left before the last one of the epoch.
    """

    def __init__(self, batches: Iterator[Any], position: int, epoch: Epoch):
        self.batches = batches
        self._position = position
        self._epoch = epoch

    @property
    def left(self) -> int:
        return self._epoch.steps - 1 - self._position % self._epoch.steps

    def advance(self, count: int) -> None:
        """Counts batches that a device loop has read."""
        self._position += count


class EpochLoop:
    """A `tftpu.engines.engine.TrainLoop` whose batches are `EpochBatches`.

    A smaller last batch has its own program.

    Args:
        full: the loop for complete batches.
        last: the loop for the last batch of an epoch.
        epoch: the length of one pass over the data.
        sums: the layout of the sums of losses and metrics that the loops return.
    """

    def __init__(self, full: TrainLoop, last: TrainLoop, epoch: Epoch, sums: TrainSumsLayout):
        self._full = full
        self._last = last
        self._weight = (epoch.last or epoch.examples) / epoch.examples
        self._sums = sums

    @property
    def model_flops(self) -> int | None:
        """The model FLOPs of a complete global batch, forward and backward."""
        return self._full.model_flops

    def compiled(self, batches: Any) -> bool:
        """Returns whether the device loop for the next batch is compiled."""
        return (self._full if batches.left else self._last).compiled(batches.batches)

    def run(self, batches: Any, steps: int) -> LoopResult:
        """Runs training steps on the devices."""
        results, asked = [], steps
        while steps:
            if batches.left:
                count = min(steps, batches.left)
                results.append(self._full.run(batches.batches, count))
            else:
                count = 1
                result = self._last.run(batches.batches, 1)
                results.append(result._replace(sums=self._sums.scale(result.sums, self._weight)))
            batches.advance(count)
            steps -= count
        sums = np.sum([result.sums for result in results], axis=0)
        return LoopResult(sums, sum(result.input_wait for result in results), asked)

    def run_each(self, batches: Any, steps: int) -> LoopResult:
        """Runs training steps on complete batches in host memory."""
        return self._full.run_each(batches, steps)

    def diverged(self, sums: np.ndarray) -> bool:
        """Returns whether the sums of a loop show a loss that is no longer finite."""
        return self._full.diverged(sums)


class StreamLoop:
    """A `tftpu.engines.engine.TrainLoop` whose batches are a `Lookahead`.

    Each batch size has its own program.

    Args:
        full: the loop for batches like the first one.
        examples: the number of examples of the first batch.
        prepare: a function that returns the loop for the arrays of a batch.
        sums: the layout of the sums of losses and metrics that the loops return.
    """

    def __init__(
        self,
        full: TrainLoop,
        examples: int,
        prepare: Callable[[Nest], TrainLoop],
        sums: TrainSumsLayout,
    ):
        self._full = full
        self._examples = examples
        self._prepare = prepare
        self._sums = sums

    @property
    def model_flops(self) -> int | None:
        """The model FLOPs of a complete global batch, forward and backward."""
        return self._full.model_flops

    def compiled(self, batches: Any) -> bool:
        """Returns whether the program for the next batch is compiled; True if there is no batch."""
        if batches.ended:
            return True
        return self._prepare(to_arrays(batches.peek())).compiled(iter(()))

    def run(self, batches: Any, steps: int) -> LoopResult:
        """Runs training steps on the devices, fewer if the stream ends."""
        results: list[LoopResult] = []
        done = 0
        while done < steps and not batches.ended:
            first = to_arrays(batches.peek())
            loop = self._prepare(first)
            alike = _take_alike(batches, _describe(first))
            result = loop.run_each(alike, steps - done)
            weight = count_examples(first) / self._examples
            results.append(result._replace(sums=self._sums.scale(result.sums, weight)))
            done += result.steps
        return LoopResult(
            np.sum([result.sums for result in results], axis=0),
            sum(result.input_wait for result in results),
            done,
        )

    def run_each(self, batches: Any, steps: int) -> LoopResult:
        """Runs training steps on batches in host memory."""
        return self.run(batches, steps)

    def diverged(self, sums: np.ndarray) -> bool:
        """Returns whether the sums of a loop show a loss that is no longer finite."""
        return self._full.diverged(sums)


def _take_alike(batches: Lookahead, description: Any) -> Iterator[Nest]:
    """Yields the arrays of batches up to the first batch of another shape or dtype."""
    while not batches.ended:
        arrays = to_arrays(batches.peek())
        if _describe(arrays) != description:
            return
        next(batches)
        yield arrays


def _describe(arrays: Nest) -> Any:
    return [(array.shape, array.dtype) for array in keras.tree.flatten(arrays)]


class Feed:
    """The batches of a run. An epoch is read only after the previous one's callbacks have run.

    Args:
        dataset, class_weight, epoch: as for `Engine.batches`.
        open_batches: a function that returns the batches from a position on, as
            `Programs.open_batches` does.
    """

    def __init__(
        self,
        dataset: Dataset,
        class_weight: dict[int, float] | None,
        epoch: Epoch | None,
        open_batches: Callable[..., Any],
    ):
        self._open_batches = open_batches
        self._dataset = dataset
        self._class_weight = class_weight
        self._epoch = epoch
        self._gate: Gate | None = None
        self._within = False  # whether an epoch has begun and not ended
        self._admitted = False  # whether the epoch's batches may be read from the open iterator
        if isinstance(dataset, PyBatches):
            dataset.end_epoch()  # Keras also ends an epoch before the first one

    @property
    def begins_again(self) -> bool:
        """True if the data can be read again after they have ended."""
        return not isinstance(self._dataset, Stream) or self._dataset.again

    def count_thrown_away(self, position: int) -> int:
        """Returns how many earlier batches must be read to start at a position of the run."""
        if not isinstance(self._dataset, Stream) or isinstance(self._dataset, SlicedArrays):
            return 0
        return self._dataset.count_unread(position)

    def open(self, position: int, pass_steps: int | None = None, new: bool = True) -> Any:
        """Returns the batches from a position on, for the train loop; closes earlier ones.

        Args:
            position: the number of batches of the run before the first one.
            pass_steps: the number of batches of a pass over a stream, if it is known.
            new: whether the batches follow those of the run; otherwise a stream that can be read
                only once continues where it is.
        """
        self.close()
        if isinstance(self._dataset, Stream):
            return self._dataset.iterate(position, pass_steps, new)
        self._gate, self._admitted = find_gate(self._dataset), False
        return self._open_batches(
            self._dataset, position, self._class_weight, self._epoch, self._gate
        )

    def begin_epoch(self, steps: int) -> None:
        """Begins an epoch unless one has begun; allows reading its remaining `steps` batches."""
        if not self._within and isinstance(self._dataset, PyBatches):
            self._dataset.begin_epoch()
        if not self._admitted and self._gate is not None:
            self._gate.admit(steps)
        self._within = self._admitted = True

    def end_epoch(self) -> None:
        """Ends the epoch, if one has begun."""
        if self._within and isinstance(self._dataset, PyBatches):
            self._dataset.end_epoch()
        self._within = self._admitted = False

    def describe_damage(self, model: keras.Model, position: int, count: int) -> str:
        """Returns a sentence about invalid values in some batches; "" if none are found.

        The batches are read again for a limited number of seconds; a stream is not read again.

        Args:
            model: the model that is trained on them.
            position: the number of batches of the run before the first one.
            count: the number of batches.
        """
        if isinstance(self._dataset, Stream):
            return ""
        try:
            for number, batch in self._read_again(position, count):
                found = batch_values.describe_damage(model, batch)
                # In arrays, each example has an index that the user knows.
                if found and isinstance(self._dataset, Arrays):
                    found = batch_values.describe_damage(model, self._dataset.parts)
                elif found:
                    found = f"in batch {number}, {found}"
                if found:
                    return f"The data may be the cause: {found}."
        except Exception:  # the user's data may raise anything; the run has ended anyway
            _log.info("The batches could not be read again.", exc_info=True)
        return ""

    def _read_again(self, position: int, count: int) -> Iterator[tuple[int, Any]]:
        """Yields up to `count` batches with their numbers in the run, from 1, for some seconds."""
        if isinstance(self._dataset, conversion.Epochs):
            batches, before = self._dataset.from_step(position), position
        elif isinstance(self._dataset, conversion.Pipeline):
            batches, before = conversion.build_training(self._dataset, position), position
        else:
            batches, before = self._dataset.repeat(), 0
        over = time.monotonic() + _DIAGNOSIS
        for number, batch in enumerate(batches.take(position + count - before), before + 1):
            if time.monotonic() > over:
                return
            if number > position:
                yield number, keras.tree.map_structure(np.asarray, batch)

    def close(self) -> None:
        """Closes the batches that were opened."""
        if self._gate is not None:
            self._gate.close()
