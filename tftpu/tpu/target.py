"""The kind of device that the code being traced is meant for, and how several divide a kernel.

A program for a TPU may be traced on a machine without one: preflight does so. Layers with a kernel
for one kind of device query this module, not the machine or a distribution strategy.

    with target.compiling_for("tpu"):
        ...  # trace
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

EXAMPLES, HEADS = "examples", "heads"  # dimensions of arrays that devices may share
GATHERED = "gathered weight"  # a weight that devices share, made whole where a layer reads it

# From a function of arrays, and the dimensions of its arguments and results, to the same function
# run by each device on its part.
Divide = Callable[[Callable[..., Any], Sequence[Any], Any], Callable[..., Any]]

_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_DIVIDE: contextvars.ContextVar[Divide | None] = contextvars.ContextVar("divide", default=None)


@contextlib.contextmanager
def compiling_for(platform: str | None, divide: Divide | None = None) -> Iterator[None]:
    """Sets what `platform` and `divided` return while the block runs, in this thread only.

    Args:
        platform: "tpu", "gpu" or "cpu"; None: unknown.
        divide: of a program for several devices, which the compiler divides, and which cannot
            divide a kernel; None: the program is that of one device.
    """
    tokens = _PLATFORM.set(platform), _DIVIDE.set(divide)
    try:
        yield
    finally:
        _PLATFORM.reset(tokens[0])
        _DIVIDE.reset(tokens[1])


def platform() -> str | None:
    """Returns the platform that is being traced for; None if nobody has set one."""
    return _PLATFORM.get()


def divided(
    function: Callable[..., Any], inputs: Sequence[Any], outputs: Any
) -> Callable[..., Any]:
    """Returns a function that each device runs on its part of the arrays.

    Args:
        function: of arrays, such as a kernel.
        inputs: for each argument a tuple of `EXAMPLES`, `HEADS` or None for each dimension, or of
            a pair of the name and a size that is not cut, such as that of a column of heads. An
            argument may be None, or a list of arrays with these dimensions.
        outputs: the same for the result, or a tuple of these for several.
    """
    divide = _DIVIDE.get()
    return function if divide is None else divide(function, inputs, outputs)
