"""The division of a global batch, announced to the functions that a loss calls."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple


class Division(NamedTuple):
    """The division of a global batch.

    Attributes:
        shares: number of shares that are computed apart, one for each replica.
        microbatches: number of microbatches that each share is cut into.
    """

    shares: int = 1
    microbatches: int = 1

    @property
    def parts(self) -> int:
        """The number of parts of the global batch that are computed apart."""
        return self.shares * self.microbatches


_DIVISION: contextvars.ContextVar[Division] = contextvars.ContextVar("division")


@contextlib.contextmanager
def divided(division: Division) -> Iterator[None]:
    """Announces the division of the batch to `announced`, in this thread only."""
    token = _DIVISION.set(division)
    try:
        yield
    finally:
        _DIVISION.reset(token)


def announced() -> Division:
    """Returns the division that is announced; that of one device outside of `divided`."""
    return _DIVISION.get(Division())
