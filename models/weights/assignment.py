"""Sets variables to values from files, on whatever devices hold them."""

import keras
import numpy as np


def assign(variable: keras.Variable, value: np.ndarray) -> None:
    """Sets a variable; of a value that is a view, only the parts that devices hold are read.

    Args:
        variable: built. Under JAX, its devices may each hold a part of it.
        value: of its shape.
    """
    if keras.config.backend() == "jax":
        from tftpu.models.kernels import jax_parts

        variable.assign(jax_parts.place_value(variable, value))
    else:
        variable.assign(np.asarray(value, np.dtype(variable.dtype)))
