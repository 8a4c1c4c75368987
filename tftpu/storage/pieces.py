"""Bytes in pieces of a few MiB: what is written, summed or sent is never whole in memory."""

from collections.abc import Iterable, Iterator

_SIZE = 4 << 20  # bytes


def cut_pieces(blocks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yields the bytes of blocks, small ones joined and large ones cut."""
    pending = bytearray()
    for block in blocks:
        for start in range(0, len(block), _SIZE):
            pending += block[start : start + _SIZE]
            if len(pending) >= _SIZE:
                yield bytes(pending)
                pending.clear()
    yield bytes(pending)
