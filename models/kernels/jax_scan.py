"""Loops over layers, by JAX: as `tftpu.models.blocks.scanned` uses them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tftpu.models.kernels.jax_checkpoint import forget_gathered, rematerialize
from tftpu.tensors import Tensor


def scan(
    body: Callable[[Tensor, list[Tensor]], Tensor],
    x: Tensor,
    weights: list[list[Tensor]],
    remat: str,
) -> Tensor:
    """Applies a body once for each set of weights, as one loop of the program.

    Args:
        body: maps a tensor and a set of weights to a tensor like the first.
        x: what the first run is given.
        weights: for each weight of a set, those of all sets.
        remat: "block": the backward pass recomputes a run from what it was given; "products": from
            that and the products with weights; "none": it gathers weights again that devices share,
            and recomputes nothing.
    """
    if remat == "none":
        body = forget_gathered(body)
    else:
        body = rematerialize(body, remat == "products")

    def step(x: Any, set_: list[Any]) -> tuple[Any, None]:
        return body(x, set_), None

    found, _ = jax.lax.scan(step, x, [jnp.stack(same) for same in weights])
    return found
