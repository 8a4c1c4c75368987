"""Arrays on several devices, made of the parts that each holds."""

from typing import Any

import jax
import keras
import numpy as np

from tftpu.models.layers.internals import read_stored_value


def place_value(variable: keras.Variable, value: np.ndarray) -> Any:
    """Returns a value on the devices of a variable, in its dtype.

    Args:
        variable: built.
        value: of its shape; of one that is a view, only what the devices hold is read.
    """
    dtype = np.dtype(variable.dtype)
    return jax.make_array_from_callback(
        value.shape,
        read_stored_value(variable).sharding,
        lambda part: np.asarray(value[part], dtype),
    )
