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
        below: for integers, what all that the model takes are below; None: that is not known.
        tried_below: likewise, what random values are drawn below, to try the model with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int | None = None
    tried_below: int = 256

    def draw_examples(self, examples: int, seed: int) -> np.ndarray:
        """Returns random values, always the same."""
        rng = np.random.default_rng(seed)
        size = (examples, *self.shape)
        if np.issubdtype(self.dtype, np.integer):
            below = min(self.tried_below, self.below or self.tried_below)
            return rng.integers(0, below, size).astype(self.dtype)
        return rng.normal(size=size).astype(self.dtype)
