"""A train loop over epochs that end with a smaller batch, as in Keras."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tftpu.engines.engine import Dataset, Engine, Epoch, LoopResult, TrainLoop
from tftpu.engines.sums import TrainSums


class EpochBatches(Iterator[Any]):
    """An iterator of `Engine.batches` that knows its position.

    Args:
        batches: the iterator.
        position: number of batches before.
        epoch: of the data.

    Attributes:
        batches: the iterator.
        left: number of batches before the last one of the epoch.
    """

    def __init__(self, batches: Iterator[Any], position: int, epoch: Epoch):
        self.batches = batches
        self._position = position
        self._epoch = epoch

    @property
    def left(self) -> int:
        return self._epoch.steps - 1 - self._position % self._epoch.steps

    def __next__(self) -> Any:
        self.moved(1)
        return next(self.batches)

    def moved(self, count: int) -> None:
        """Counts batches that a device loop took."""
        self._position += count


class EpochLoop:
    """See `tftpu.engines.engine.TrainLoop`; its batches are `EpochBatches`.

    The smaller batch has a program of its own.

    Args:
        full: trains on complete batches.
        last: trains on the last batch of an epoch.
        epoch: of the data.
        sums: the layout of the loops' sums.
    """

    def __init__(self, full: TrainLoop, last: TrainLoop, epoch: Epoch, sums: TrainSums):
        self._full = full
        self._last = last
        self._weight = (epoch.last or epoch.examples) / epoch.examples
        self._sums = sums

    @property
    def model_flops(self) -> int:
        """The model FLOPs of a complete global batch, forward and backward."""
        return self._full.model_flops

    def compiled(self, batches: Any) -> bool:
        """Returns whether the device loop of the next batch is compiled."""
        return (self._full if batches.left else self._last).compiled(batches.batches)

    def run(self, batches: Any, steps: int) -> LoopResult:
        """Runs training steps on the devices."""
        results = []
        while steps:
            if batches.left:
                count = min(steps, batches.left)
                results.append(self._full.run(batches.batches, count))
            else:
                count = 1
                sums, waited = self._last.run(batches.batches, 1)
                results.append(LoopResult(self._sums.weighted(sums, self._weight), waited))
            batches.moved(count)
            steps -= count
        sums = np.sum([result.sums for result in results], axis=0)
        return LoopResult(sums, sum(result.input_wait for result in results))

    def diverged(self, sums: np.ndarray) -> bool:
        """Returns whether the sums of a loop show a loss that is no longer finite."""
        return self._full.diverged(sums)


def batches_from(
    engine: Engine, dataset: Dataset, class_weight: dict[int, float] | None, epoch: Epoch | None
) -> Callable[[int], Iterator[Any]]:
    """Returns a function that opens a data set at a position, for the train loop of its epochs."""

    def batches(position: int) -> Iterator[Any]:
        found = engine.batches(dataset, position, class_weight, epoch)
        return EpochBatches(found, position, epoch) if epoch is not None else found

    return batches
