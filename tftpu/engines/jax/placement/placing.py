"""Puts values of the host onto the devices of a mesh, which may belong to several hosts."""

from typing import Any

import jax
import numpy as np


def place_value(value: Any, sharding: Any) -> jax.Array:
    """Returns an array with the given sharding.

    All hosts must pass the same value; each puts the parts of its own devices onto them. Hosts
    exchange nothing, unless the value is already on the devices of all hosts.

    Args:
        value: a NumPy array, or an array of JAX.
        sharding: the sharding; None puts the value on the first device.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if not _is_on_host(value):  # jax.device_put fails where each host has one device (JAX 0.10.2)
        return jax.jit(lambda array: array, out_shardings=sharding)(value)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _is_on_host(value: Any) -> bool:
    """Returns whether this process has the whole value."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable
