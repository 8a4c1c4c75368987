"""Convolutions of groups of channels in programs for several devices.

Where devices hold the same examples, as along `tensor`, XLA multiplies the gradient of such a
convolution's kernel by their number (jax 0.10.2 on CPU devices; a test tries it). So each device
convolves its own examples and groups here, and XLA has nothing to divide.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tftpu import sharding
from tftpu.sharding import CHANNELS, EXAMPLES


def convolve(original: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> jax.Array:
    """Computes what `jax.lax.conv_general_dilated` does, with groups sharded by hand.

    The sharding is that of the program being traced. JAX's own function computes what has no
    groups, and all where devices hold examples of their own.

    Args:
        original: that function.
        args, kwargs: its arguments.
    """
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    groups = given.pop("feature_group_count", 1)
    if groups == 1 or not sharding.is_sharded(sharding.TOKENS):
        return original(*args, **kwargs)
    inputs, kernel = given.pop("lhs"), given.pop("rhs")
    numbers = jax.lax.conv_dimension_numbers(
        inputs.shape, kernel.shape, given.pop("dimension_numbers", None)
    )
    channels, filters = numbers.lhs_spec[1], numbers.rhs_spec[0]

    def convolve_shard(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        here = inputs.shape[channels] * groups // whole
        return original(
            inputs, kernel, **given, dimension_numbers=numbers, feature_group_count=here
        )

    whole = inputs.shape[channels]
    a_group = (CHANNELS, whole // groups), (CHANNELS, kernel.shape[filters] // groups)
    arguments = (
        _name_dimensions(numbers.lhs_spec, EXAMPLES, a_group[0]),
        _name_dimensions(numbers.rhs_spec, a_group[1], None),
    )
    results = _name_dimensions(numbers.out_spec, EXAMPLES, a_group[1])
    return sharding.shard_function(convolve_shard, arguments, results)(inputs, kernel)


def _name_dimensions(places: Sequence[int], first: Any, second: Any) -> tuple[Any, ...]:
    """Returns the names of an array's dimensions for `tftpu.sharding.shard_function`.

    Args:
        places: where the dimensions are that JAX names first and second, and those of space.
        first, second: the names of these two.
    """
    names = {places[0]: first, places[1]: second}
    return tuple(names.get(place) for place in range(len(places)))
