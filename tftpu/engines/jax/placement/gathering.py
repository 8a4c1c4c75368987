"""Gathers weights that are sharded along `fsdp` or `sequence` while a layer uses them.

A device gathers a weight where a layer reads it, in the compute dtype, and keeps only its shard of
the gradient (ZeRO-3; Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). Blocks that are
recomputed, or run as a loop, gather again in the backward pass; other layers keep the gathered
weights. By default, XLA's partitioner would multiply by shards of the weights, and then add up over
devices the activations, which are larger than the weights.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from tftpu.config.mesh import TENSOR
from tftpu.engines import keras_internals
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.sharding import GATHERED
from tftpu.tensors import Tensor


class Gathering:
    """Gathers the weights that a forward pass reads.

    Args:
        layout: the shardings of the variables.
        variables: the variables of a model, trained or not.
    """

    def __init__(self, layout: Layout, variables: Sequence[keras.Variable]):
        places = {
            id(v): (
                layout.find_weight_sharding(v),
                _gather_sharding(layout.find_weight_sharding(v)),
            )
            for v in variables
        }
        self._places = {key: pair for key, pair in places.items() if pair[0] != pair[1]}

    @contextlib.contextmanager
    def reading(self, sharded: Sequence[keras.Variable] = ()) -> Iterator[None]:
        """Gathers every weight that a forward pass reads inside the `with` block.

        Args:
            sharded: weights that stay sharded.
        """
        if not self._places:
            yield
            return
        kept = {id(variable) for variable in sharded}

        def read(variable: keras.Variable, value: Tensor) -> Tensor:
            place = self._places.get(id(variable))
            if place is None:
                return value
            if id(variable) in kept:
                return jax.lax.with_sharding_constraint(value, place[0])
            return _gather(value, *place)

        with keras_internals.reading_variables(read):
            yield


def _gather_sharding(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of a gathered weight, which keeps only the `tensor` axis."""
    axes = [axis if axis == TENSOR else None for axis in sharding.spec]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


def _gather(value: Tensor, cut: NamedSharding, whole: NamedSharding) -> Tensor:
    """Returns a weight with the sharding `whole`; its gradient gets the sharding `cut`."""

    def gather(value: Any) -> Any:
        return checkpoint_name(jax.lax.with_sharding_constraint(value, whole), GATHERED)

    def forward(value: Any) -> tuple[Any, None]:
        # Names the value here, too: a remat policy does not see names inside a custom_vjp.
        return gather(value), None

    def backward(_: None, grad: Any) -> tuple[Any]:
        return (jax.lax.with_sharding_constraint(grad, cut),)

    gathered = jax.custom_vjp(gather)
    gathered.defvjp(forward, backward)
    return gathered(value)
