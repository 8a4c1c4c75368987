"""Compiles functions that use a model outside of training, for the model's devices."""

from collections.abc import Callable
from typing import Any, Protocol

import keras


class Compile(Protocol):
    """The type of `compile_function` bound to a model."""

    def __call__(
        self, function: Callable[..., Any], replaces_state: bool = False
    ) -> Callable[..., Any]: ...


def compile_function(
    model: keras.Model, function: Callable[..., Any], replaces_state: bool = False
) -> Callable[..., Any]:
    """Returns a function that runs as one program on the devices that hold a model.

    Every device computes the same; the function returns the results of the first.

    Args:
        model: the model whose variables the function reads.
        function: a function that returns a nest of arrays. Its positional arguments are nests of
            arrays, and whole numbers; each new number compiles it again.
        replaces_state: whether the first argument is a state, and the function returns the next
            state and other results. The next state may reuse the memory of the one passed in, which
            must not be used again.
    """
    if keras.config.backend() == "jax":
        from tftpu.engines.jax import functions
    else:
        from tftpu.engines.tensorflow import functions
    return functions.compile_function(model, function, replaces_state=replaces_state)
