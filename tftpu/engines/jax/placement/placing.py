"""Puts values from host memory on the devices of a mesh, which may belong to several hosts."""

from typing import Any

import jax
import numpy as np


def place_value(value: Any, sharding: Any) -> jax.Array:
    """Returns an array with the given sharding.

    All hosts must pass the same value; each host puts shards on its own devices. Hosts communicate
    only if the value is already on the devices of several hosts.

    Args:
        value: a NumPy array or a `jax.Array`.
        sharding: the sharding. None puts a NumPy array on this process's first device, and leaves
            a `jax.Array` where it is.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if not _is_on_host(value):  # jax.device_put fails where each host has one device (JAX 0.10.2)
        return jax.jit(lambda array: array, out_shardings=sharding)(value)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _is_on_host(value: Any) -> bool:
    """Returns whether this process can read the whole value."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable
