"""Compiled functions of a model outside of training."""

from collections.abc import Callable
from typing import Any

import keras

# Compiles a function of positional arguments (nests of arrays, and whole numbers) to one program
# that runs on the devices of a model. It is compiled again for each value of the numbers.
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def compile_function(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs as one program on the devices that hold a model.

    Every device computes the same; the function returns the results of the first.

    Args:
        model: the model whose variables the function reads.
        function: a function that returns a nest of arrays. Its positional arguments are nests of
            arrays, and whole numbers; each new number compiles it again.
    """
    if keras.config.backend() == "jax":
        from tftpu.engines.jax import functions
    else:
        from tftpu.engines.tensorflow import functions
    return functions.compile_function(model, function)
