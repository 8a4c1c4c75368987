"""The place of every record in the output: the shuffle, and the division into shards."""

import dataclasses

import numpy as np

from tftpu.input_pipelines.reading.permutation import Permutation


@dataclasses.dataclass(frozen=True)
class Plan:
    """The place of every record, which is known once all records are counted.

    Args:
        counts: the number of records in each part.
        shards: the number of shards.
        seed: the seed of the shuffle.
    """

    counts: tuple[int, ...]
    shards: int
    seed: int

    @property
    def examples(self) -> int:
        """The number of all records."""
        return sum(self.counts)

    def compute_begin(self, shard: int) -> int:
        """Returns the place of a shard's first record in the shuffled order of all records."""
        return shard * self.examples // self.shards

    def list_records(self, shard: int) -> np.ndarray:
        """Returns the source indices of a shard's records, (n,), int64, in the shard's order."""
        places = np.arange(self.compute_begin(shard), self.compute_begin(shard + 1))
        return Permutation(self.examples, self.seed).forward(places)

    def locate_records(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the part of each record and its index in that part; `records`: source indices."""
        firsts = np.cumsum([0, *self.counts])
        part = np.searchsorted(firsts, records, side="right") - 1
        return part, records - firsts[part]

    def list_places(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shard of each record of a part, and its place among all shuffled records."""
        first = sum(self.counts[:part])
        places = Permutation(self.examples, self.seed).invert(
            np.arange(first, first + self.counts[part])
        )
        begins = np.array([self.compute_begin(shard) for shard in range(self.shards)])
        return np.searchsorted(begins, places, side="right") - 1, places
