"""Random examples for the scripts: as many as eight steps take, always the same."""

import numpy as np

STEPS, BATCH = 8, 8
EXAMPLES = STEPS * BATCH


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns (EXAMPLES, *shape) normal numbers, float32."""
    return np.random.default_rng(seed).normal(size=(EXAMPLES, *shape)).astype(np.float32)


def uniform(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns (EXAMPLES, *shape) numbers between 0 and 1, float32."""
    return np.random.default_rng(seed).uniform(size=(EXAMPLES, *shape)).astype(np.float32)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Returns (EXAMPLES, *shape) integers from `low` to `high` - 1, int32."""
    return np.random.default_rng(seed).integers(low, high, (EXAMPLES, *shape)).astype(np.int32)


def padded_tokens(vocabulary: int, length: int, seed: int = 0) -> np.ndarray:
    """Returns (EXAMPLES, length) tokens from 1 on, int32; half of the rows and more end in 0."""
    tokens = integers(1, vocabulary, length, seed=seed)
    lengths = np.random.default_rng(seed + 1).integers(2, 2 * length, EXAMPLES)
    return np.where(np.arange(length) < lengths[:, None], tokens, 0).astype(np.int32)
