"""The inputs of an exported model."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of an exported model.

    Args:
        name: the name of the input.
        shape: the shape of an example.
        dtype: the dtype, such as "uint8".
        below: for integers, the largest value that the model accepts, plus 1; None: unknown.
        tried_below: for integers, the largest random test value, plus 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int | None = None
    tried_below: int = 256

    def draw_examples(self, examples: int, seed: int) -> np.ndarray:
        """Returns random values, (examples, *shape); the same arguments give the same values."""
        rng = np.random.default_rng(seed)
        size = (examples, *self.shape)
        if np.issubdtype(self.dtype, np.integer):
            below = min(self.tried_below, self.below or self.tried_below)
            return rng.integers(0, below, size).astype(self.dtype)
        return rng.normal(size=size).astype(self.dtype)
