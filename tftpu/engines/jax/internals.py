"""The private interfaces of Keras's JAX backend that the engine uses, and what it replaces in JAX.

Tested with Keras 3.14 - 3.15 and jax 0.10.2; `tests/engines/jax/test_convolution.py` tries them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from jax._src.lax import convolution
from jax.core import Tracer
from keras.src import backend

_Put = Callable[[Any, jax.sharding.Sharding], jax.Array]


def set_layout(variable: keras.Variable, layout: Any) -> None:
    """Makes every assignment to a variable place the value by a layout."""
    private: Any = variable
    private._layout = layout


def place_values_by(put: _Put) -> None:
    """Makes a function place every value assigned to a variable, from now on in this process.

    Keras moves an array of the host to one device as a whole, and divides it there: a device would
    need room for the largest array of a file. Its own way also fails where each of several hosts
    has one device (JAX 0.10.2).

    Args:
        put: a function from a value and the sharding of a variable to the array.
    """
    library: Any = backend.distribution_lib
    own = library.distribute_tensor
    if getattr(own, "__module__", "") == __name__:  # an earlier call has replaced it already
        return

    def distribute_tensor(tensor: Any, layout: Any) -> Any:
        if isinstance(tensor, Tracer) or not isinstance(layout, jax.sharding.Sharding):
            return own(tensor, layout)
        if isinstance(tensor, jax.Array) and tensor.sharding.is_equivalent_to(layout, tensor.ndim):
            return tensor
        return put(tensor, layout)

    library.distribute_tensor = distribute_tensor
    _place_assigned_by(put)


def _place_assigned_by(put: _Put) -> None:
    """Makes a function place the arrays of the host that are assigned to sharded variables.

    Values of another shape are left to Keras, which raises an error for them.
    """
    kind: Any = backend.Variable
    own = kind.assign

    def assign(variable: Any, value: Any) -> Any:
        sharding = variable._layout
        if (
            isinstance(value, np.ndarray)
            and isinstance(sharding, jax.sharding.Sharding)
            and value.shape == tuple(variable.shape)
            and not backend.in_stateless_scope()
        ):
            value = put(value.astype(variable._dtype, copy=False), sharding)
        return own(variable, value)

    kind.assign = assign


def convolve_by(convolve: Callable[..., Any]) -> None:
    """Makes a function convolve for Keras's layers and all else, from now on in this process.

    JAX's own module has the function under its name too: `vmap` calls that with more groups.

    Args:
        convolve: a function of `jax.lax.conv_general_dilated` and of its arguments.
    """
    own = convolution.conv_general_dilated
    if getattr(own, "__module__", "") == __name__:  # an earlier call has replaced it already
        return

    @functools.wraps(own, assigned=["__doc__"])
    def conv_general_dilated(*args: Any, **kwargs: Any) -> Any:
        return convolve(own, *args, **kwargs)

    jax.lax.conv_general_dilated = convolution.conv_general_dilated = conv_general_dilated
