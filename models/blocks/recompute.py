"""Recomputes parts of a model in the backward pass instead of keeping their activations."""

import functools
from collections.abc import Callable

import keras

from tftpu.errors import UserError
from tftpu.tensors import Tensor


def run_recomputed(
    part: Callable[[Tensor], Tensor],
    variables: list[keras.Variable],
    x: Tensor,
    keep_products: bool = False,
) -> Tensor:
    """Returns `part(x)`, keeping only x for the backward pass (Chen et al. 2016).

    Follows https://arxiv.org/abs/1604.06174. Numbers do not change: random layers draw the same
    numbers again, and batch statistics are updated once.

    Args:
        part: applies layers to one float tensor and returns one.
        variables: all variables of these layers.
        x: the input of `part`.
        keep_products: whether to keep its products with weights, and what attention's kernels
            found, too; JAX alone can.

    Raises:
        UserError: Keras runs on another backend than TensorFlow or JAX.
    """
    trained = [v for v in variables if v.trainable]
    others = [v for v in variables if not v.trainable]
    changed = []

    def forward(x, weights, states):
        mapping = [*zip(trained, weights), *zip(others, states)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            before = [scope.get_current_value(v) for v in others]
            y = part(x)
            after = [scope.get_current_value(v) for v in others]
        changed[:] = [v for v, old, new in zip(others, before, after) if new is not old]
        return y, [new for old, new in zip(before, after) if new is not old]

    y, values = _choose_checkpoint(keep_products)(forward, x, trained, others)
    for variable, value in zip(changed, values):
        variable.assign(value)
    return y


def _choose_checkpoint(keep_products: bool) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Returns the function of Keras's backend that recomputes."""
    backend = keras.config.backend()
    if backend == "tensorflow":
        from tftpu.models.kernels.tensorflow_checkpoint import checkpoint
    elif backend == "jax":
        from tftpu.models.kernels import jax_checkpoint

        return functools.partial(jax_checkpoint.checkpoint, keep_products=keep_products)
    else:
        raise UserError(
            "model.remat='block' works only on Keras's TensorFlow and JAX backends, but Keras "
            f"runs on {backend}: set KERAS_BACKEND to one of these, or model.remat to 'none'."
        )
    return checkpoint
