"""The division of a global batch, announced to the functions that a loss calls."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tftpu.tensors import Tensor


class Exchange(NamedTuple):
    """Exchange between replicas inside a loss function.

    Attributes:
        gather: returns the rows of all replicas, of those of this one and the number of replicas.
        find_index: returns the number of this replica.
    """

    gather: Callable[[Tensor, int], Tensor]
    find_index: Callable[[], Tensor]


class Division(NamedTuple):
    """The division of a global batch.

    Attributes:
        shards: number of shards that are computed apart, one for each replica.
        microbatches: number of microbatches that each shard is cut into.
        exchange: between the replicas that compute them; None: one program computes the batch.
    """

    shards: int = 1
    microbatches: int = 1
    exchange: Exchange | None = None

    @property
    def parts(self) -> int:
        """The number of parts of the global batch that are computed apart."""
        return self.shards * self.microbatches


_DIVISION: contextvars.ContextVar[Division] = contextvars.ContextVar("division")


@contextlib.contextmanager
def divided(division: Division) -> Iterator[None]:
    """Announces the division of the batch to `find_division`, in this thread only."""
    token = _DIVISION.set(division)
    try:
        yield
    finally:
        _DIVISION.reset(token)


def find_division() -> Division:
    """Returns the division that is announced; that of one device outside of `shard_function`."""
    return _DIVISION.get(Division())
