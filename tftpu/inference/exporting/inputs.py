"""The inputs of an exported model."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of an exported model.

    Args:
        name: of the input.
        shape: of an example.
        dtype: such as "uint8".
        below: for integers, what random values are drawn below, to try the model with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int | None = None

    def drawn(self, examples: int, seed: int) -> np.ndarray:
        """Returns random values, always the same."""
        rng = np.random.default_rng(seed)
        size = (examples, *self.shape)
        if np.issubdtype(self.dtype, np.integer):
            return rng.integers(0, self.below or 256, size).astype(self.dtype)
        return rng.normal(size=size).astype(self.dtype)
