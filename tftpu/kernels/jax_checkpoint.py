"""Recomputation in the backward pass, by JAX, of blocks and of loops over blocks.

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

_ATTENTION = "attention"
_FORMS = (
    *("sharding_constraint", "reshape", "squeeze", "slice", "transpose"),
    *("convert_element_type", "broadcast_in_dim", "copy"),
)


def forget_gathered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose backward pass gathers weights again instead of keeping them."""
    return jax.checkpoint(function, policy=_is_kept)


def _is_kept(primitive: Any, *_: Any, **fields: Any) -> bool:
    """Returns whether the backward pass keeps a result; it keeps all but gathered weights.

    JAX 0.10's `save_anything_except_these_names` keeps everything. A constraint is what gathers: it
    is repeated as well, or its result would be kept in place of the one with the name. So are other
    forms of an array, which might be those of a weight.
    """
    named = primitive.name == "name" and fields["name"] == GATHERED
    return not named and primitive.name not in _FORMS


def rematerialize(function: Callable[..., Any], keep_products: bool) -> Callable[..., Any]:
    """Returns a function that keeps little for the backward pass, which recomputes the rest.

    Args:
        function: the function.
        keep_products: whether it keeps its products with weights, which are the ones without batch
            dimensions, and what attention's kernels found.
    """
    policies = jax.checkpoint_policies
    kept = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(_ATTENTION)
    )
    return jax.checkpoint(function, policy=kept if keep_products else None)


def mark_attention(results: Sequence[Tensor]) -> list[Tensor]:
    """Returns results of a kernel for attention, by a name under which they can be kept."""
    return [checkpoint_name(result, _ATTENTION) for result in results]


def checkpoint(
    forward: Callable[..., Nest],
    x: Nest,
    trained: list[keras.Variable],
    others: list[keras.Variable],
    keep_products: bool,
) -> Nest:
    """Returns `forward(x, weights, states)`, keeping none of its intermediate results.

    Args: as for `tftpu.kernels.tensorflow_checkpoint.checkpoint`, and
        keep_products: whether to keep the products with weights.
    """
    weights, states = ([read_stored_value(v) for v in group] for group in (trained, others))
    return rematerialize(forward, keep_products)(x, weights, states)


def scan(
    body: Callable[[Tensor, list[Tensor]], tuple[Tensor, Nest]],
    x: Tensor,
    weights: list[list[Tensor]],
    remat: str,
) -> tuple[Tensor, Nest]:
    """Applies a body once for each set of weights, as one loop of the program.

    Args:
        body: maps a tensor and a set of weights to a tensor like the first, and to other results.
        x: what the first run is given.
        weights: for each weight of a set, those of all sets.
        remat: "block": the backward pass recomputes a run from what it was given; "products": from
            that and the products with weights; "none": it gathers weights again that devices share,
            and recomputes nothing.

    Returns:
        The last tensor, and the other results of all runs, stacked.
    """
    if remat == "none":
        body = forget_gathered(body)
    else:
        body = rematerialize(body, remat == "products")
    return jax.lax.scan(body, x, [jnp.stack(same) for same in weights])
