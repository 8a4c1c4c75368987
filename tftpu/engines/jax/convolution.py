"""Grouped convolutions in programs for several devices.

If devices hold the same examples, as along `tensor`, XLA wrongly multiplies the gradient of a
grouped convolution's kernel by their number (jax 0.10.2 on CPU devices; a test checks this).
Here each device convolves its own examples and groups, so XLA does not partition the convolution.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from tftpu import sharding
from tftpu.sharding import CHANNELS, EXAMPLES


def convolve(original: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> jax.Array:
    """Computes `jax.lax.conv_general_dilated`, with the groups sharded explicitly over devices.

    Calls JAX's function unchanged if there is one group, inside a function that runs per device, or
    if the program being traced has no axis whose devices hold the same examples.

    Args:
        original: `jax.lax.conv_general_dilated`.
        args, kwargs: the arguments of `original`.
    """
    if not sharding.is_sharded(sharding.TOKENS) or _is_of_one_device():
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    groups = given.pop("feature_group_count", 1)
    if groups == 1:
        return original(*args, **kwargs)
    inputs, kernel = given.pop("lhs"), given.pop("rhs")
    numbers = jax.lax.conv_dimension_numbers(
        inputs.shape, kernel.shape, given.pop("dimension_numbers", None)
    )
    place, filters = numbers.lhs_spec[1], numbers.rhs_spec[0]
    channels = inputs.shape[place]

    def convolve_shard(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        here = inputs.shape[place] * groups // channels
        return original(
            inputs, kernel, **given, dimension_numbers=numbers, feature_group_count=here
        )

    read, written = ((CHANNELS, count // groups) for count in (channels, kernel.shape[filters]))
    arguments = (
        _name_dimensions(numbers.lhs_spec, EXAMPLES, read),
        _name_dimensions(numbers.rhs_spec, written, None),
    )
    results = _name_dimensions(numbers.out_spec, EXAMPLES, written)
    return sharding.shard_function(convolve_shard, arguments, results)(inputs, kernel)


def _is_of_one_device() -> bool:
    """Returns whether the code being traced runs per device, as inside `jax.shard_map`."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def _name_dimensions(places: Sequence[int], first: Any, second: Any) -> tuple[Any, ...]:
    """Returns the names of an array's dimensions for `tftpu.sharding.shard_function`.

    Args:
        places: a spec of `jax.lax.ConvDimensionNumbers`: the positions of the two non-spatial
            dimensions, then of the spatial ones.
        first, second: the names of the two non-spatial dimensions; the others have none.
    """
    names = {places[0]: first, places[1]: second}
    return tuple(names.get(place) for place in range(len(places)))
