"""Makes the division of the global batch known to functions that a loss calls."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tftpu.optim.chunked import WHOLE, Rows
from tftpu.tensors import Tensor


class Exchange(NamedTuple):
    """Exchange between replicas inside a loss function.

    Attributes:
        gather: a function that takes this replica's rows of a tensor, and the number of replicas,
            and returns the rows of all replicas.
        find_index: a function that returns the index of this replica.
    """

    gather: Callable[[Tensor, int], Tensor]
    find_index: Callable[[], Tensor]


class Division(NamedTuple):
    """The division of a global batch.

    Attributes:
        shards: the number of shards that are computed separately, one per replica.
        microbatches: number of microbatches that each shard is divided into.
        exchange: the exchange between the replicas; None if one program computes the whole batch.
        rows: the sharding of the rows of the output layer's matrix, (classes, width).
    """

    shards: int = 1
    microbatches: int = 1
    exchange: Exchange | None = None
    rows: Rows = WHOLE

    @property
    def parts(self) -> int:
        """The number of microbatches in all shards, which are computed separately."""
        return self.shards * self.microbatches


_DIVISION: contextvars.ContextVar[Division] = contextvars.ContextVar("division")


@contextlib.contextmanager
def divided(division: Division) -> Iterator[None]:
    """Sets the division that `find_division` returns inside the `with` block, in this thread."""
    token = _DIVISION.set(division)
    try:
        yield
    finally:
        _DIVISION.reset(token)


def find_division() -> Division:
    """Returns the current division; outside of `divided`, the division for one device."""
    return _DIVISION.get(Division())
