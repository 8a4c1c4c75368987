"""The protocol between the trainer and what runs its steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Leaf:
    """One variable of a checkpoint, as NumPy sees it.

    Attributes:
        name: its path in the model or the optimizer.
        shape: its global shape.
        dtype: NumPy's name of its dtype, such as "float32" or "bfloat16".
        read: returns its value in host memory, as a view or as a copy.
        assign: sets its value from an array of the same shape and dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    assign: Callable[[np.ndarray], None]


class Tracer(Protocol):
    """Records profiles of device steps."""

    def start(self, logdir: str) -> bool:
        """Starts a profile; returns False if another one is running in this process."""
        ...

    def stop(self) -> None:
        """Stops the running profile and writes it; raises OSError if it cannot be written."""
        ...

    def marker(self, step: int) -> AbstractContextManager[object]:
        """Returns a context manager that marks the device loop starting at a step."""
        ...

    def note(self, name: str, **numbers: int) -> None:
        """Writes an event that carries numbers into the running profile."""
        ...
