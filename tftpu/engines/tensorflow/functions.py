"""Compiled functions of a model outside of training: see `tftpu.engines.functions`."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tftpu.engines.tensorflow import internals
from tftpu.engines.tensorflow.step.loops import wrap_for_platform
from tftpu.runtime.notes import without_notes
from tftpu.tensors import Tensor


def compile_function(
    model: Any,
    function: Callable[..., Any],
    strategy: tf.distribute.Strategy | None = None,
    weights: Callable[[], list[Tensor]] | None = None,
    replaces_state: bool = False,
) -> Callable[..., Any]:
    """Compiles a function of a model, which runs on all replicas and returns the first's result.

    Args:
        model: the model whose variables the function reads.
        function, replaces_state: see `tftpu.engines.functions.compile_function`.
        strategy: the strategy of the model; None: the strategy in whose scope it was built.
        weights: a function that returns the values to use for the trainable variables; None: their
            present values.
    """
    used: tf.distribute.Strategy = strategy or model.distribute_strategy

    def run_with_weights(*args: Any) -> Any:
        values = weights() if weights is not None else []
        mapping = list(zip(model.trainable_variables, values))
        with keras.StatelessScope(state_mapping=mapping):
            return function(*args)

    # Uses jit_compile only on one device: a TPU compiles everything anyway, and would run a nested
    # XLA function on its host. With several CPUs, XLA looks for all variables on the first one.
    on_tpu = isinstance(used, tf.distribute.TPUStrategy)
    alone = used.num_replicas_in_sync == 1 and not on_tpu
    if alone:
        _quieten_xla()
    if replaces_state and alone:
        return _compile_replacing(run_with_weights)
    traced = wrap_for_platform("tpu" if on_tpu else None, run_with_weights)
    each = tf.function(traced, jit_compile=alone or None, autograph=False)

    def run_on_replicas(*args: Any) -> Any:
        found = used.run(each, args)
        return keras.tree.map_structure(
            lambda value: used.experimental_local_results(value)[0], found
        )

    whole = internals.build_graph_function(run_on_replicas)
    return lambda *args: whole(*(_to_tensors(value) for value in args))


@functools.cache
def _quieten_xla() -> None:
    """Hides XLA's log line for the first program of a process, by compiling an empty program."""
    nothing: Any = tf.function(lambda: tf.constant(0), jit_compile=True)
    with without_notes((b"Compiled cluster", b"InitializeLog")), tf.device("CPU:0"):
        nothing()


def _compile_replacing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled function that updates its state in place, in the memory of variables.

    It copies a state that is not in variables to new variables, and returns these.
    """

    def replace(variables: Any, *args: Any) -> Any:
        values = keras.tree.map_structure(lambda variable: variable.value(), variables)
        state, others = function(values, *args)
        keras.tree.map_structure(lambda variable, x: variable.assign(x), variables, state)
        return others

    program = internals.build_graph_function(replace, jit_compile=True)

    def run(state: Any, *args: Any) -> Any:
        variables = keras.tree.map_structure(
            lambda x: x if isinstance(x, tf.Variable) else tf.Variable(x, trainable=False), state
        )
        return variables, program(variables, *(_to_tensors(value) for value in args))

    return run


def _to_tensors(value: Any) -> Any:
    """Converts arrays, but not Python integers, to tensors; each integer compiles a new program."""
    return keras.tree.map_structure(
        lambda x: x if type(x) is int else tf.convert_to_tensor(x), value
    )
