"""A seeded permutation of 0 .. count - 1 and its inverse, without computing all of it.

A Feistel network over the next power of four, applied until the result is below `count` (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"). NumPy only, so that the permutation is the
same on every machine and with every version of TensorFlow.
"""

import numpy as np

_ROUNDS = 8


class Permutation:
    """A permutation of 0 .. count - 1.

    Args:
        count: how many numbers are permuted, at least 1.
        seed: the seed that selects the permutation.
    """

    def __init__(self, count: int, seed: int):
        self.count = count
        # Bits of each of the two halves of a number that the network exchanges.
        self._bits = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
        self._mask = (np.uint64(1) << self._bits) - np.uint64(1)
        rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            self._keys = _mix_bits(_mix_bits(np.uint64(seed % 2**64) + rounds) + rounds)

    def forward(self, places: np.ndarray) -> np.ndarray:
        """Returns the values of the permutation at places, int64."""
        return self._walk(places, self._keys, swap=False)

    def invert(self, values: np.ndarray) -> np.ndarray:
        """Returns the places of values, int64: `invert(forward(p)) == p`."""
        return self._walk(values, self._keys[::-1], swap=True)

    def _walk(self, numbers: np.ndarray, keys: np.ndarray, swap: bool) -> np.ndarray:
        out = np.asarray(numbers).astype(np.uint64)
        outside = np.ones(out.shape, bool)
        while outside.any():
            out[outside] = self._permute_by_network(out[outside], keys, swap)
            outside = out >= self.count
        return out.astype(np.int64)

    def _permute_by_network(self, numbers: np.ndarray, keys: np.ndarray, swap: bool) -> np.ndarray:
        left, right = numbers >> self._bits, numbers & self._mask
        if swap:
            left, right = right, left
        for key in keys:
            left, right = right, left ^ (_mix_bits(right ^ key) & self._mask)
        if swap:
            left, right = right, left
        return left << self._bits | right


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """Applies the finalizer of SplitMix64, which makes each of the 64 bits depend on all."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
