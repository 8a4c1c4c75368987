"""The kind of device that the code being traced is meant for, and how several share arrays.

A program for a TPU may be traced on a machine without one: preflight does so. Layers with a kernel
for one kind of device query this module, not the machine or a distribution strategy.

    with target.compiling_for("tpu"):
        ...  # trace
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Dimensions of arrays that devices may share: examples; heads of attention; the time of an example;
# and the tokens of what blocks add to, which is time cut further, between two products that are cut
# (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
EXAMPLES, HEADS, TIME, TOKENS = "examples", "heads", "time", "tokens"
GATHERED = "gathered weight"  # a weight that devices share, made whole where a layer reads it

# From a function of arrays, and the dimensions of its arguments and results, to the same function
# run by each device on its part.
Divide = Callable[[Callable[..., Any], Sequence[Any], Any], Callable[..., Any]]


class Ring(NamedTuple):
    """Devices that share the time of examples, each consecutive tokens.

    Attributes:
        axis: the name by which JAX's collectives call them.
        size: their number.
    """

    axis: str
    size: int


class Sharing(NamedTuple):
    """The way in which the devices of a program that the compiler divides share arrays.

    Attributes:
        parts: of the dimensions inside of a layer that they share, `HEADS`, `TIME` and `TOKENS`,
            the number of parts that each is cut into.
        ring: those that share `TIME`, if any do.
        divide: runs a function such as a kernel, which the compiler cannot divide.
        cut: returns an array, whose dimensions with a name each device holds a part of.
    """

    parts: Mapping[str, int]
    ring: Ring | None
    divide: Divide
    cut: Callable[[Any, Sequence[str | None]], Any]


_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_SHARING: contextvars.ContextVar[Sharing | None] = contextvars.ContextVar("sharing", default=None)


@contextlib.contextmanager
def compiling_for(platform: str | None, sharing: Sharing | None = None) -> Iterator[None]:
    """Sets what the functions of this module see while the block runs, in this thread only.

    Args:
        platform: "tpu", "gpu" or "cpu"; None: unknown.
        sharing: of a program for several devices; None: the program is that of one device.
    """
    tokens = _PLATFORM.set(platform), _SHARING.set(sharing)
    try:
        yield
    finally:
        _PLATFORM.reset(tokens[0])
        _SHARING.reset(tokens[1])


def platform() -> str | None:
    """Returns the platform that is being traced for; None if nobody has set one."""
    return _PLATFORM.get()


def divided(
    function: Callable[..., Any], inputs: Sequence[Any], outputs: Any
) -> Callable[..., Any]:
    """Returns a function that each device runs on its part of the arrays.

    Args:
        function: of arrays, such as a kernel.
        inputs: for each argument a tuple of `EXAMPLES`, `HEADS`, `TIME` or None for each dimension,
            or of a pair of the name and a size that is not cut, such as that of a column of heads.
            An argument may be None, or a list of arrays with these dimensions.
        outputs: the same for the result, or a tuple of these for several.
    """
    sharing = _SHARING.get()
    return function if sharing is None else sharing.divide(function, inputs, outputs)


def is_cut(name: str) -> bool:
    """Returns whether devices share a dimension inside of a layer: `HEADS`, `TIME`, `TOKENS`."""
    return parts(name) > 1


def parts(name: str) -> int:
    """Returns the number of parts that a dimension inside of a layer is cut into."""
    sharing = _SHARING.get()
    return 1 if sharing is None else sharing.parts.get(name, 1)


def ring() -> Ring | None:
    """Returns the devices that share the time of examples; None if each has all of it."""
    sharing = _SHARING.get()
    return None if sharing is None else sharing.ring


def cut(array: Any, dims: Sequence[str | None]) -> Any:
    """Returns an array of which each device holds a part, if devices share its dimensions.

    Args:
        array: of any kind.
        dims: for each dimension its name, or None: the compiler decides about it.
    """
    sharing = _SHARING.get()
    if sharing is None or sharing.parts.keys().isdisjoint(dims):
        return array
    return sharing.cut(array, dims)
