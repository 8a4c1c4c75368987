"""Training on streams, whose batches may have any size and end at any time."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tftpu.engines.data.streams import Lookahead, to_arrays
from tftpu.engines.engine import LoopResult, TrainLoop
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.objectives.sums import TrainSums
from tftpu.tensors import Nest


class StreamLoop:
    """A `tftpu.engines.engine.TrainLoop` whose batches are a `Lookahead`.

    Each size of a batch has its own program.

    Args:
        full: the loop for batches like the first one.
        examples: the number of examples of the first batch.
        prepare: a function from the arrays of a batch to its loop.
        sums: the layout of the loops' sums.
    """

    def __init__(
        self,
        full: TrainLoop,
        examples: int,
        prepare: Callable[[Nest], TrainLoop],
        sums: TrainSums,
    ):
        self._full = full
        self._examples = examples
        self._prepare = prepare
        self._sums = sums

    @property
    def model_flops(self) -> int | None:
        """The model FLOPs of a complete global batch, forward and backward."""
        return self._full.model_flops

    def compiled(self, batches: Lookahead) -> bool:
        """Returns whether the program for the next batch is compiled."""
        if batches.ended:
            return True
        return self._prepare(to_arrays(batches.peek())).compiled(iter(()))

    def run(self, batches: Lookahead, steps: int) -> LoopResult:
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
        """Runs training steps on batches of the host."""
        return self.run(batches, steps)

    def diverged(self, sums: np.ndarray) -> bool:
        """Returns whether the sums of a loop show a loss that is no longer finite."""
        return self._full.diverged(sums)


def _take_alike(batches: Lookahead, description: Any) -> Iterator[Nest]:
    """Yields the arrays of batches until one has another shape."""
    while not batches.ended and _describe(to_arrays(batches.peek())) == description:
        yield to_arrays(next(batches))


def _describe(arrays: Nest) -> Any:
    return [(array.shape, array.dtype) for array in keras.tree.flatten(arrays)]
