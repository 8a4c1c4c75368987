"""Builds device loops, which run many steps in one call from the host."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tftpu import sharding
from tftpu.engines.tensorflow import internals


def wrap_for_platform(platform: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that `tftpu.sharding.get_platform` works while it is traced.

    Args:
        platform: the platform of the devices, "tpu"; None: GPUs or CPUs.
        function: the function to be traced.
    """

    def traced(*args):
        with sharding.compiling_for(platform):
            return function(*args)

    return traced


class StepVariants(NamedTuple):
    """Variants of a step, of which each step of a loop runs one.

    Attributes:
        due: the second argument of the step in each variant: the indices of objectives to train.
        next: a function that returns the index of the next variant, () int32.
    """

    due: Sequence[tuple[int, ...]]
    next: Callable[[], tf.Tensor]


def build_device_loop(
    strategy: tf.distribute.Strategy,
    step: Callable[..., None],
    afterwards: Callable[[], None] | None = None,
    turns: "StepVariants | None" = None,
) -> Any:
    """Returns a loop of steps in one `tf.function`, traced once for any number of steps.

    Args:
        strategy: the strategy whose replicas run the step.
        step: a function of one replica's shard of a batch and, with `turns`, the objectives due.
        afterwards: a function that runs on every replica at the end of the loop.
        turns: the variants of the step; None: there is only one.

    Returns:
        A `tf.function` of an iterator and a number of steps, () int32. It returns the seconds that
        the loop waited for its input. Where the host runs ahead of the devices, as on a TPU, the
        devices waited at most this long.
    """

    # No jit_compile: a TPU compiles everything anyway, and would run a nested XLA function on its
    # host ("could not find registered transfer manager for platform Host"). On a CPU, XLA's
    # convolutions are slower.
    def loop(iterator, count):
        def body(index, waited):
            asked = _read_time()
            with tf.control_dependencies([asked]):
                batch = next(iterator)
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                waited += _read_time() - asked
            if turns is None:
                strategy.run(step, args=(batch,))
            else:
                # Each branch calls `strategy.run`: a branch inside of it must not have collectives.
                branches = [_build_branch(strategy, step, batch, due) for due in turns.due]
                tf.switch_case(turns.next(), branches)
            return index + 1, waited

        start = tf.constant(0), tf.zeros((), tf.float64)
        _, waited = tf.while_loop(lambda index, _: index < count, body, start)
        if afterwards is not None:
            strategy.run(afterwards)
        return waited

    # AutoGraph would convert every function that is called, which takes longer than tracing them.
    return internals.build_graph_function(loop)


def build_repeat_loop(
    strategy: tf.distribute.Strategy,
    step: Callable[..., None],
    afterwards: Callable[[], None] | None = None,
) -> Any:
    """Returns a `tf.function` of a batch and a count, () int32, which repeats a step."""

    def loop(batch, count):
        def body(index):
            strategy.run(step, args=(batch,))
            return index + 1

        tf.while_loop(lambda index: index < count, body, [tf.constant(0)])
        if afterwards is not None:
            strategy.run(afterwards)

    return internals.build_graph_function(loop)


def _read_time() -> tf.Tensor:
    """Returns the time in seconds, () float64; 0 if TensorFlow allows only deterministic ops."""
    return tf.zeros((), tf.float64) if internals.is_deterministic() else tf.timestamp()


def _build_branch(
    strategy: tf.distribute.Strategy, step: Callable[..., None], batch: Any, due: tuple[int, ...]
) -> Callable[[], None]:
    def run_branch() -> None:
        strategy.run(lambda shard: step(shard, due), args=(batch,))

    return run_branch
