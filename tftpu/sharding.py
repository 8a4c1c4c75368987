"""The logical axes of arrays, and the devices that a program being traced shards them over.

A program for a TPU may be traced on a machine without one: preflight does so. Layers with a kernel
for one kind of device query this module, not the machine or a distribution strategy.

    with sharding.compiling_for("tpu"):
        ...  # trace
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Axes that arrays may be sharded along: the examples, the heads of attention, the channels of a
# convolution, and the time of an example. TOKENS is the time of a residual stream, which is sharded
# further between two sharded layers (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
EXAMPLES, HEADS, CHANNELS, TIME, TOKENS = "examples", "heads", "channels", "time", "tokens"
# The `checkpoint_name` of a sharded weight that was gathered for a layer, for rematerialization.
GATHERED = "gathered weight"

# Turns a function of arrays, with the dimensions of its arguments and results, into one that each
# device runs on its shard.
ShardFunction = Callable[[Callable[..., Any], Sequence[Any], Any], Callable[..., Any]]


class Ring(NamedTuple):
    """Devices that shard the time axis; each has consecutive tokens of every example.

    Attributes:
        axis: the name of their mesh axis in JAX's collectives.
        size: the number of devices.
    """

    axis: str
    size: int


class Sharding(NamedTuple):
    """The sharding of the arrays of a program that the compiler partitions over devices.

    Attributes:
        shards: number of shards along each sharded axis inside of a layer, `HEADS`, `CHANNELS`,
            `TIME` and `TOKENS`.
        ring: the devices that share `TIME`, if any do.
        shard_function: converts functions that the compiler cannot partition, such as kernels.
        shard: constrains an array to be sharded along its named dimensions.
    """

    shards: Mapping[str, int]
    ring: Ring | None
    shard_function: ShardFunction
    shard: Callable[[Any, Sequence[str | None]], Any]


_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_SHARDING: contextvars.ContextVar[Sharding | None] = contextvars.ContextVar(
    "sharding", default=None
)


@contextlib.contextmanager
def compiling_for(platform: str | None, sharding: Sharding | None = None) -> Iterator[None]:
    """Sets the platform and sharding of programs traced in the `with` block, in this thread only.

    Args:
        platform: "tpu", "gpu" or "cpu"; None: unknown.
        sharding: how a program for several devices is sharded; None: the program is for one device.
    """
    tokens = _PLATFORM.set(platform), _SHARDING.set(sharding)
    try:
        yield
    finally:
        _PLATFORM.reset(tokens[0])
        _SHARDING.reset(tokens[1])


def get_platform() -> str | None:
    """Returns the platform for which a program is traced; None if it is not set."""
    return _PLATFORM.get()


def shard_function(
    function: Callable[..., Any], inputs: Sequence[Any], outputs: Any
) -> Callable[..., Any]:
    """Returns a function that each device runs on its shards; `function` if there are no shards.

    Args:
        function: a function of arrays, such as a kernel.
        inputs: for each argument a tuple of `EXAMPLES`, `HEADS`, `CHANNELS`, `TIME` or None for
            each dimension. A pair of a name and a size shards only whole blocks of that size, such
            as columns of heads. An argument may be None, or a list of arrays with these dimensions.
        outputs: the same for the result, or a tuple of these for several.
    """
    sharding = _SHARDING.get()
    return function if sharding is None else sharding.shard_function(function, inputs, outputs)


def is_sharded(name: str) -> bool:
    """Returns whether an axis inside of a layer, such as `HEADS` or `TOKENS`, is sharded."""
    return count_shards(name) > 1


def count_shards(name: str) -> int:
    """Returns the number of shards along an axis inside of a layer; 1 if it is not sharded."""
    sharding = _SHARDING.get()
    return 1 if sharding is None else sharding.shards.get(name, 1)


def get_ring() -> Ring | None:
    """Returns the devices that shard the time axis; None if it is not sharded."""
    sharding = _SHARDING.get()
    return None if sharding is None else sharding.ring


def shard(array: Any, dims: Sequence[str | None]) -> Any:
    """Returns an array, sharded along each named dimension whose axis the program shards.

    Args:
        array: an array of any kind.
        dims: the name of each dimension, or None to leave its sharding to the compiler.
    """
    sharding = _SHARDING.get()
    if sharding is None or sharding.shards.keys().isdisjoint(dims):
        return array
    return sharding.shard(array, dims)
