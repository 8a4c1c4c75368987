"""Convolutions of groups of channels in programs for several devices.

Where devices hold the same examples, as along `tensor`, XLA multiplies the gradient of such a
convolution's kernel by their number (jax 0.10.2 on CPU devices; a test tries it). So each device
convolves its own examples and groups here, and XLA has nothing to divide.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from tftpu import sharding
from tftpu.sharding import CHANNELS, EXAMPLES


def convolve(original: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> jax.Array:
    """Computes what `jax.lax.conv_general_dilated` does, with groups sharded by hand.

    The sharding is that of the program being traced. JAX's own function computes what has no
    groups, what a device computes of its own shard, and all where devices hold examples of their
    own.

    Args:
        original: that function.
        args, kwargs: its arguments.
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
    """Returns whether what is traced is what one device computes, as in `jax.shard_map`."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def _name_dimensions(places: Sequence[int], first: Any, second: Any) -> tuple[Any, ...]:
    """Returns the names of an array's dimensions for `tftpu.sharding.shard_function`.

    Args:
        places: where the dimensions are that JAX names first and second, and those of space.
        first, second: the names of these two.
    """
    names = {places[0]: first, places[1]: second}
    return tuple(names.get(place) for place in range(len(places)))
