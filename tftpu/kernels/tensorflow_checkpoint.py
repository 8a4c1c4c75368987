"""Recomputation in the backward pass by TensorFlow, for `tftpu.blocks.recompute`."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tftpu import sharding
from tftpu.kernels import internals
from tftpu.tensors import Nest, Tensor


def checkpoint(
    forward: Callable[..., tuple[Nest, list[Tensor], list[Tensor]]],
    x: Nest,
    trained: list[keras.Variable],
    others: list[keras.Variable],
) -> tuple[Nest, list[Tensor], list[Tensor]]:
    """Returns `forward(x, weights, states)`, keeping none of its intermediate results.

    Args:
        forward: a pure function. Of its three results the first two have gradients.
        x: a float tensor, or a nest of them.
        trained: the variables whose values are `weights`.
        others: the variables whose values are `states`, which get no gradient.
    """
    # Read here, because `forward` opens a stateless scope that hides values set by an outer one.
    states = [tf.convert_to_tensor(v) for v in others]
    leaves = keras.tree.flatten(x)
    results: list[Nest] = []  # the last results of `forward`, for their structure

    def compute(given: Sequence[Tensor]) -> list[Tensor]:
        x_again = keras.tree.pack_sequence_as(x, given[: len(leaves)])
        results[:] = [forward(x_again, list(given[len(leaves) :]), states)]
        return [t for t in keras.tree.flatten(results[0]) if t is not None]

    @tf.custom_gradient
    def run(*given):
        found = compute(given)
        y, losses, _ = results[0]
        count = sum(t is not None for t in keras.tree.flatten((y, losses)))
        chosen = [i for i in range(count) if found[i].dtype.is_floating]

        def gradient(*upstream):
            again, upstream = _wait_for(given[: len(leaves)], [upstream[i] for i in chosen])
            sources = [*again, *given[len(leaves) :]]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                repeated = compute(sources)
            return tape.gradient([repeated[i] for i in chosen], sources, upstream)

        return found, gradient

    found = iter(run(*leaves, *(tf.convert_to_tensor(v) for v in trained)))
    flat = [None if t is None else next(found) for t in keras.tree.flatten(results[0])]
    return keras.tree.pack_sequence_as(results[0], flat)


def _wait_for(
    given: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns both arguments unchanged, but not before `upstream` is computed.

    Otherwise a compiler would merge the recomputation with the forward pass and keep its results.
    """
    if sharding.get_platform() == "tpu":
        both = internals.optimization_barrier(*given, *upstream)
        return both[: len(given)], both[len(given) :]
    with tf.control_dependencies(upstream):
        return [tf.identity(x) for x in given], list(upstream)
