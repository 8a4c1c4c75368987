"""Recomputes parts of a model in the backward pass instead of keeping their activations."""

import functools
from collections.abc import Callable, Sequence

import keras

from tftpu.errors import UserError
from tftpu.tensors import Nest, Tensor

# The outputs, the losses that layers add, and the new values of variables that are not trained.
Recomputed = tuple[Nest, list[Tensor], list[Tensor]]


def run_recomputed(
    part: Callable[[Nest], Nest],
    layers: Sequence[keras.Layer],
    x: Nest,
    remat: str = "block",
) -> Nest:
    """Returns `part(x)`, keeping only x for the backward pass (Chen et al. 2016).

    Follows https://arxiv.org/abs/1604.06174. Results do not change: random layers draw the same
    numbers again, batch statistics are updated once, and losses that layers add count once.

    Args:
        part: a function that applies layers to a float tensor, or a nest of them, and returns
            tensors.
        layers: the layers that `part` applies, or the layers or models that contain them. Losses
            are added to the last one.
        x: the input of `part`.
        remat: "block" keeps only x. On JAX, "attention" also keeps the results of attention
            kernels, "products" keeps those and the products with weights, and "offload" keeps x
            in host memory.

    Raises:
        UserError: Keras runs on another backend than TensorFlow or JAX.
    """
    variables = {id(v): v for layer in layers for v in layer.variables}.values()
    trained = [v for v in variables if v.trainable]
    others = [v for v in variables if not v.trainable]
    changed: list[keras.Variable] = []

    def forward(x: Nest, weights: list[Tensor], states: list[Tensor]) -> Recomputed:
        mapping = [*zip(trained, weights), *zip(others, states)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            before = [scope.get_current_value(v) for v in others]
            y = part(x)
            after = [scope.get_current_value(v) for v in others]
        changed[:] = [v for v, old, new in zip(others, before, after) if new is not old]
        return y, scope.losses, [new for old, new in zip(before, after) if new is not old]

    y, losses, values = _choose_checkpoint(remat)(forward, x, trained, others)
    for variable, value in zip(changed, values):
        variable.assign(value)
    for loss in losses:
        layers[-1].add_loss(loss)
    return y


def _choose_checkpoint(remat: str) -> Callable[..., Recomputed]:
    """Returns the backend's function that calls one and recomputes it in the backward pass."""
    backend = keras.config.backend()
    if backend == "tensorflow":
        from tftpu.kernels.tensorflow_checkpoint import checkpoint
    elif backend == "jax":
        from tftpu.kernels import jax_checkpoint

        return functools.partial(jax_checkpoint.checkpoint, remat=remat)
    else:
        raise UserError(
            "model.remat='block' works only on Keras's TensorFlow and JAX backends, but Keras "
            f"runs on {backend}: set KERAS_BACKEND to tensorflow or jax, or model.remat to 'none'."
        )
    return checkpoint
