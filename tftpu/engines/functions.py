"""Compiled functions of a model outside of training."""

from collections.abc import Callable
from typing import Any

import keras

# From a function of positional arguments, nests of arrays and whole numbers, to one that runs as
# one program on the devices that hold a model. It is compiled for each value of the numbers.
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def compile_function(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs as one program on the devices that hold a model.

    Every device computes the same; the results are those of the first.

    Args:
        model: the variables that the function reads.
        function: of positional arguments, nests of arrays and whole numbers, to a nest of arrays.
            It is compiled for each value of the numbers.
    """
    if keras.config.backend() == "jax":
        from tftpu.engines.jax import functions
    else:
        from tftpu.engines.tensorflow import functions
    return functions.compile_function(model, function)
