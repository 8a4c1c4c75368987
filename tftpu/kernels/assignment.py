"""Sets variables to values from files, on the devices that hold them."""

import keras
import numpy as np

from tftpu.layer_internals import read_stored_value


def assign(variable: keras.Variable, value: np.ndarray) -> None:
    """Sets a variable; on JAX, reads only the slices of the value that local devices hold.

    Args:
        variable: a built variable. Under JAX, it may be sharded over devices.
        value: the new value, of the same shape.
    """
    dtype = np.dtype(variable.dtype)
    if keras.config.backend() != "jax":
        variable.assign(np.asarray(value, dtype))
        return
    import jax

    sharding = read_stored_value(variable).sharding
    variable.assign(
        jax.make_array_from_callback(
            value.shape, sharding, lambda part: np.asarray(value[part], dtype)
        )
    )
