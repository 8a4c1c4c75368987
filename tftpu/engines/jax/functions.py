"""Compiled functions of a model outside of training: see `tftpu.engines.functions`."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import keras

from tftpu.tensors import Tensor


def compile_function(
    model: keras.Model,
    function: Callable[..., Any],
    tracing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    weights: Callable[[], list[Tensor]] | None = None,
    replaces_state: bool = False,
) -> Callable[..., Any]:
    """Returns a jitted function that reads a model's variables.

    Args:
        model: the model; each call of the function uses the present values of its variables.
        function, replaces_state: see `tftpu.engines.functions.compile_function`.
        tracing: a function that returns the context in which to trace.
        weights: a function that returns the values to use for the trainable variables; None uses
            their present values.
    """
    trainable, untrained = model.trainable_variables, model.non_trainable_variables
    variables = [*trainable, *untrained]

    def pure(
        numbers: tuple[int, ...], values: list[jax.Array], args: list[Any], state: list[Any]
    ) -> Any:
        given = iter(numbers)
        whole = [*state, *(next(given) if value is None else value for value in args)]
        with tracing(), keras.StatelessScope(state_mapping=list(zip(variables, values))):
            return function(*whole)

    jitted = jax.jit(pure, static_argnums=0, donate_argnums=3)

    def run(*args: Any) -> Any:
        values = weights() if weights is not None else [v.value for v in trainable]
        state, args = ([args[0]], args[1:]) if replaces_state else ([], args)
        numbers = tuple(value for value in args if type(value) is int)
        arrays = [None if type(value) is int else value for value in args]
        return jitted(numbers, [*values, *(v.value for v in untrained)], arrays, state)

    return run
