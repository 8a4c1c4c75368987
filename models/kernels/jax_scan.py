"""Loops over layers, by JAX: as `tftpu.models.layers.scanned` uses them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tftpu.tensors import Tensor


def scan(
    body: Callable[[Tensor, list[Tensor]], Tensor],
    x: Tensor,
    weights: list[list[Tensor]],
    recompute: bool,
) -> Tensor:
    """Applies a body once for each set of weights, as one loop of the program.

    Args:
        body: maps a tensor and a set of weights to a tensor like the first.
        x: what the first run is given.
        weights: for each weight of a set, those of all sets.
        recompute: whether the backward pass recomputes a run from what it was given.
    """
    if recompute:
        body = jax.checkpoint(body)

    def step(x: Any, set_: list[Any]) -> tuple[Any, None]:
        return body(x, set_), None

    found, _ = jax.lax.scan(step, x, [jnp.stack(same) for same in weights])
    return found
