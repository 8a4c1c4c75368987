"""Recomputation in the backward pass on JAX, for blocks and for loops over blocks.

`tftpu.blocks.recompute` and `tftpu.blocks.scanned` use it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name

from tftpu.layer_internals import read_stored_value
from tftpu.sharding import GATHERED
from tftpu.tensors import Nest, Tensor

_ATTENTION, _INPUT = "attention", "block input"
_FORMS = (
    *("sharding_constraint", "reshape", "squeeze", "slice", "transpose"),
    *("convert_element_type", "broadcast_in_dim", "copy"),
)


def forget_gathered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose backward pass gathers weights again instead of keeping them."""
    return jax.checkpoint(function, policy=_is_kept)


def _is_kept(primitive: Any, *_: Any, **fields: Any) -> bool:
    """Returns whether a result is kept for the backward pass; gathered weights are recomputed.

    JAX 0.10's `save_anything_except_these_names` would keep them as well. A gathered weight is the
    result of a sharding constraint, which an op then names. The results of both are recomputed, and
    so are those of reshapes, casts and the like, because each could be a copy of the weight.
    """
    named = primitive.name == "name" and fields["name"] == GATHERED
    return not named and primitive.name not in _FORMS


def rematerialize(function: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """Returns a function that keeps little for the backward pass, which recomputes the rest.

    Args:
        function: the function; the input of a block is its first argument.
        remat: "block": keeps only the arguments; "attention": also the results of attention
            kernels; "products": these and the products with weights, which are the ones without
            batch dimensions; "offload": keeps only the block's input, in the host's memory.
    """
    policies = jax.checkpoint_policies
    attention = policies.save_only_these_names(_ATTENTION)
    if remat == "attention":
        return jax.checkpoint(function, policy=attention)
    if remat == "products":
        kept = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, attention
        )
        return jax.checkpoint(function, policy=kept)
    if remat == "offload":
        kept = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(_naming_input(function), policy=kept)
    return jax.checkpoint(function)


def _naming_input(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that names its first argument for checkpoint policies."""

    def named(x: Nest, *rest: Any) -> Any:
        return function(jax.tree.map(lambda t: checkpoint_name(t, _INPUT), x), *rest)

    return named


def mark_attention(results: Sequence[Tensor]) -> list[Tensor]:
    """Names the results of an attention kernel, so that checkpoint policies can keep them."""
    return [checkpoint_name(result, _ATTENTION) for result in results]


def checkpoint(
    forward: Callable[..., Nest],
    x: Nest,
    trained: list[keras.Variable],
    others: list[keras.Variable],
    remat: str,
) -> Nest:
    """Returns `forward(x, weights, states)`, whose backward pass recomputes most results.

    Args: as for `tftpu.kernels.tensorflow_checkpoint.checkpoint`, and
        remat: the results to keep, as for `rematerialize`.
    """
    weights, states = ([read_stored_value(v) for v in group] for group in (trained, others))
    return rematerialize(forward, remat)(x, weights, states)


def scan(
    body: Callable[[Tensor, list[Tensor]], tuple[Tensor, Nest]],
    x: Tensor,
    weights: list[list[Tensor]],
    remat: str,
) -> tuple[Tensor, Nest]:
    """Applies a body once for each set of weights, as one loop of the program.

    Args:
        body: maps a tensor and a set of weights to a tensor like the first, and to other results.
        x: the tensor for the first run.
        weights: for each weight of a set, the list of its values, one for each set.
        remat: the results to keep, as for `rematerialize`; "none": the backward pass recomputes
            nothing, but gathers sharded weights again.

    Returns:
        The last tensor, and the other results of all runs, stacked.
    """
    if remat == "none":
        body = forget_gathered(body)
    else:
        body = rematerialize(body, remat)
    return jax.lax.scan(body, x, [jnp.stack(same) for same in weights])
