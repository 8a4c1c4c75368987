"""Splits content into pieces of some MiB, to write or send it without a second copy in memory."""

from collections.abc import Iterable, Iterator

_SIZE = 4 << 20  # bytes


def cut_pieces(blocks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yields the bytes of blocks in pieces of 4 to 8 MiB; the last one may be smaller or empty."""
    pending = bytearray()
    for block in blocks:
        for start in range(0, len(block), _SIZE):
            pending += block[start : start + _SIZE]
            if len(pending) >= _SIZE:
                yield bytes(pending)
                pending.clear()
    yield bytes(pending)
