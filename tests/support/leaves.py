"""A small state to save, with NumPy arrays as leaves."""

import numpy as np

from tftpu.engines.engine import Leaf


def leaf(name: str, array: np.ndarray) -> Leaf:
    """Returns a leaf that reads and assigns an array in place."""

    def assign(value: np.ndarray) -> None:
        assert (value.shape, value.dtype) == (array.shape, array.dtype)
        np.copyto(array, value)

    return Leaf(name, array.shape, array.dtype.name, lambda: array, assign)


def leaves(value: float, shape: tuple[int, ...] = (3, 2)) -> dict[str, list[Leaf]]:
    """Returns a kernel filled with a value, and a step counter of the same value."""
    return {
        "model": [leaf("kernel", np.full(shape, value, np.float32))],
        "step": [leaf("step", np.array(int(value)))],
    }


def value_of(groups: dict[str, list[Leaf]]) -> float:
    """Returns the value that the kernel is filled with."""
    return float(groups["model"][0].read().flat[0])


def step_of(groups: dict[str, list[Leaf]]) -> int:
    """Returns the value of the step counter."""
    return int(groups["step"][0].read())
