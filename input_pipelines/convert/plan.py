"""Where every record of a conversion goes: the shuffle, and how it is cut into shards."""

import dataclasses

import numpy as np

from tftpu.input_pipelines.reading.permutation import Permutation


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where every record goes, once all are counted.

    Args:
        counts: records of each part.
        shards: how many there will be.
        seed: of the shuffle.
    """

    counts: tuple[int, ...]
    shards: int
    seed: int

    @property
    def examples(self) -> int:
        return sum(self.counts)

    def begin(self, shard: int) -> int:
        """The first place of a shard in the shuffled row of all records."""
        return shard * self.examples // self.shards

    def records_of(self, shard: int) -> np.ndarray:
        """The records of a shard in its order, by their number in the whole."""
        places = np.arange(self.begin(shard), self.begin(shard + 1))
        return Permutation(self.examples, self.seed).forward(places)

    def located(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts of records, and their numbers there."""
        firsts = np.cumsum([0, *self.counts])
        part = np.searchsorted(firsts, records, side="right") - 1
        return part, records - firsts[part]

    def places_of(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """The shard of each record of a part, and its place in the whole row."""
        first = sum(self.counts[:part])
        places = Permutation(self.examples, self.seed).back(
            np.arange(first, first + self.counts[part])
        )
        begins = np.array([self.begin(shard) for shard in range(self.shards)])
        return np.searchsorted(begins, places, side="right") - 1, places
