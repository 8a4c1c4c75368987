"""The place of every record in the output: the shuffle, and its cut into shards."""

import dataclasses

import numpy as np

from tftpu.input_pipelines.reading.permutation import Permutation


@dataclasses.dataclass(frozen=True)
class Plan:
    """The place of every record, once all are counted.

    Args:
        counts: records of each part.
        shards: number of shards.
        seed: of the shuffle.
    """

    counts: tuple[int, ...]
    shards: int
    seed: int

    @property
    def examples(self) -> int:
        """The number of all records."""
        return sum(self.counts)

    def compute_begin(self, shard: int) -> int:
        """Returns the first place of a shard in the shuffled row of all records."""
        return shard * self.examples // self.shards

    def list_records(self, shard: int) -> np.ndarray:
        """Returns the numbers of a shard's records, in its order."""
        places = np.arange(self.compute_begin(shard), self.compute_begin(shard + 1))
        return Permutation(self.examples, self.seed).forward(places)

    def locate_records(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the parts of records, and their numbers in these parts."""
        firsts = np.cumsum([0, *self.counts])
        part = np.searchsorted(firsts, records, side="right") - 1
        return part, records - firsts[part]

    def list_places(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shard of each record of a part, and its place in the row of all records."""
        first = sum(self.counts[:part])
        places = Permutation(self.examples, self.seed).invert(
            np.arange(first, first + self.counts[part])
        )
        begins = np.array([self.compute_begin(shard) for shard in range(self.shards)])
        return np.searchsorted(begins, places, side="right") - 1, places
