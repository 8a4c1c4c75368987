"""Private interfaces of Keras's JAX backend, and replacements of functions of Keras and JAX.

Tested with Keras 3.14 - 3.15 and jax 0.10.2: see `tests/engines/jax/test_convolution.py`.
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
    """Sets the layout with which a variable places every value that is assigned to it."""
    private: Any = variable
    private._layout = layout


def place_values_by(put: _Put) -> None:
    """Places every value assigned to a variable with `put`, from now on in this process.

    Keras copies a whole array from the host to one device and shards it there, so this device would
    need memory for the largest array in full. Keras's function also fails if several hosts have
    one device each (JAX 0.10.2).

    Args:
        put: a function from a value and the sharding of a variable to the `jax.Array`.
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
    """Places NumPy arrays that are assigned to sharded variables with `put`.

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
    """Replaces `jax.lax.conv_general_dilated` by `convolve`, from now on in this process.

    Also replaces it in JAX's private module, where `vmap` finds it and calls it with more groups.

    Args:
        convolve: a function of the original `jax.lax.conv_general_dilated` and its arguments.
    """
    own = convolution.conv_general_dilated
    if getattr(own, "__module__", "") == __name__:  # an earlier call has replaced it already
        return

    @functools.wraps(own, assigned=["__doc__"])
    def conv_general_dilated(*args: Any, **kwargs: Any) -> Any:
        return convolve(own, *args, **kwargs)

    jax.lax.conv_general_dilated = convolution.conv_general_dilated = conv_general_dilated
