"""Keeps the keys and values of the tokens that a language model has read, for later tokens.

While a cache is open, attention layers write to it and read from it:

    with open_cache(Cache(...)) as cache:
        model(tokens)
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tftpu.tensors import Tensor, ops

# A batch is padded to at least this many rows on a TPU. With fewer, the vector unit computes matrix
# products instead of the matrix unit, which takes several times as long as reading the matrix.
ROWS = 8


class Pair(NamedTuple):
    """The keys and the values of one layer, each (batch, slots, key_heads * head_dim)."""

    keys: Tensor
    values: Tensor


class Cache:
    """The keys and values of all attention layers of a model, by layer name.

    Each token of a row has a slot.

    Args:
        slots: the number of tokens for which a row has room.
        pairs: the keys and values of earlier tokens, by layer; empty: nothing was read yet.
        slot: () int32, the slot of the first new token, the same for all rows; None: no `pairs`.
        visible: (batch, time, slots), bool: the slots that each new token sees, including its own;
            None: no `pairs`.

    Attributes:
        pairs: the argument, and the keys and values of tokens read while the cache is open.
        visible: the argument.
    """

    def __init__(
        self,
        slots: int,
        pairs: Mapping[str, Pair] | None = None,
        slot: Tensor | None = None,
        visible: Tensor | None = None,
    ):
        self.pairs = dict(pairs or {})
        self.visible = visible
        self._slots = slots
        self._slot = slot

    def start(self, layer: str, keys: Tensor, values: Tensor) -> None:
        """Keeps keys and values of the first tokens, each (batch, time, key_heads, head_dim)."""

        def kept(x: Tensor) -> Tensor:
            return ops.pad(_join_heads(x), ((0, 0), (0, self._slots - x.shape[1]), (0, 0)))

        self.pairs[layer] = Pair(kept(keys), kept(values))

    def extend(self, layer: str, keys: Tensor, values: Tensor) -> Pair:
        """Adds keys and values, (batch, time, key_heads, head_dim); returns those of all tokens."""
        before, start = self.pairs[layer], (0, self._slot, 0)
        self.pairs[layer] = Pair(
            ops.slice_update(before.keys, start, _join_heads(keys)),
            ops.slice_update(before.values, start, _join_heads(values)),
        )
        return self.pairs[layer]


def _join_heads(x: Tensor) -> Tensor:
    """Returns (batch, time, heads, head_dim) with all heads of a token side by side.

    In this form they fill the tiles of a TPU's memory, and one more token changes only one row.
    """
    return ops.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3]))


_OPEN: contextvars.ContextVar[Cache | None] = contextvars.ContextVar("cache", default=None)


@contextlib.contextmanager
def open_cache(cache: Cache) -> Iterator[Cache]:
    """Makes attention layers use a cache within the block."""
    token = _OPEN.set(cache)
    try:
        yield cache
    finally:
        _OPEN.reset(token)


def find_open_cache() -> Cache | None:
    """Returns the open cache; None if there is none."""
    return _OPEN.get()
