"""A small state to save, with NumPy arrays as leaves."""

import numpy as np

from tftpu.engines.leaf import Leaf


def leaf(name: str, array: np.ndarray) -> Leaf:
    """Returns a leaf that reads and assigns an array in place."""

    def assign(value: np.ndarray) -> None:
        assert (value.shape, value.dtype) == (array.shape, array.dtype)
        np.copyto(array, value)

    return Leaf.undivided(name, array.shape, array.dtype.name, lambda: array, assign)


def leaves(value: float, shape: tuple[int, ...] = (3, 2)) -> dict[str, list[Leaf]]:
    """Returns a kernel filled with a value, and a step counter of the same value."""
    return {
        "model": [leaf("kernel", np.full(shape, value, np.float32))],
        "step": [leaf("step", np.array(int(value)))],
    }


def value(leaf: Leaf) -> np.ndarray:
    """Returns the value of a leaf that is held in full."""
    [region] = leaf.held
    return leaf.read(region)


def assign(leaf: Leaf, array: np.ndarray) -> None:
    """Sets a leaf that is held in full."""
    [region] = leaf.held
    leaf.assign({region: array})


def value_of(groups: dict[str, list[Leaf]]) -> float:
    """Returns the value that the kernel is filled with."""
    return float(value(groups["model"][0]).flat[0])


def step_of(groups: dict[str, list[Leaf]]) -> int:
    """Returns the value of the step counter."""
    return int(value(groups["step"][0]))
