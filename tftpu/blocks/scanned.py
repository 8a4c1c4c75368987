"""Runs equal blocks as one loop over their stacked weights.

The program then contains one block, however deep the model is, and compiles as fast as one block.
Each block keeps its own variables, with their names and checkpoints: their values are stacked
inside the program.
"""

from collections.abc import Sequence
from typing import Any

import keras

from tftpu import layer_internals as internals
from tftpu.errors import UserError
from tftpu.tensors import Tensor, ops

LARGE = 10**9  # number of parameters from which "auto" uses the loop


def is_wanted(scan: str, parameters: int) -> bool:
    """Returns whether to run a model's blocks as a loop, if they are alike.

    Args:
        scan: the option of the model: "auto", "none" or "block".
        parameters: the number of the model's parameters.

    Raises:
        UserError: `scan` is "block", and Keras runs on another backend than JAX.
    """
    backend = keras.config.backend()
    if scan == "block" and backend != "jax":
        raise UserError(
            f"model.scan='block' works only on the JAX engine, but Keras runs on {backend}: use "
            "engine=jax or model.scan='none'."
        )
    return backend == "jax" and (scan == "block" or (scan == "auto" and parameters >= LARGE))


def is_uniform(blocks: Sequence[keras.Model]) -> bool:
    """Returns whether blocks differ only in their names and the values of their variables."""
    descriptions = [[_describe_layer(layer) for layer in block.layers] for block in blocks]
    return all(description == descriptions[0] for description in descriptions)


def run(
    blocks: Sequence[keras.Model],
    x: Tensor,
    given: list[Tensor | None],
    training: bool,
    remat: str,
) -> Tensor:
    """Runs equal blocks one after the other, as a loop; returns the output of the last block.

    Args:
        blocks: the blocks; each maps `[x, *given]` to a tensor of x's shape and dtype.
        x: the input of the first block.
        given: further inputs, the same for every block.
        training: as for a model's `call`.
        remat: what the backward pass recomputes, as for `BlockModel`.
    """
    from tftpu.kernels.jax_checkpoint import scan

    first = blocks[0]
    changed: list[int] = []  # the variables that a run changes, such as the states of dropout

    def body(x: Tensor, values: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with keras.StatelessScope(state_mapping=list(zip(first.variables, values))) as scope:
            before = [scope.get_current_value(v) for v in first.variables]
            x = first([x, *given], training=training)
            after = [scope.get_current_value(v) for v in first.variables]
        changed[:] = [i for i, (old, new) in enumerate(zip(before, after)) if new is not old]
        return x, [after[i] for i in changed]

    columns = [read_values(block) for block in blocks]
    x, stacked = scan(body, x, [list(same) for same in zip(*columns)], remat)
    for place, values in zip(changed, stacked):
        for block, value in zip(blocks, values):
            block.variables[place].assign(value)
    return x


def read_values(block: keras.Layer) -> list[Tensor]:
    """Returns the values of a block's variables, in the dtype in which its layers use them.

    In a 16-bit dtype the stacked values take half of the memory, and the layers would cast them
    anyway.
    """
    dtypes = internals.compute_dtypes(block)

    def read_value(variable: keras.Variable) -> Tensor:
        found = ops.convert_to_tensor(internals.read_stored_value(variable))
        dtype = dtypes.get(id(variable))
        is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(found.dtype))
        return ops.cast(found, dtype) if dtype and is_float else found

    return [read_value(v) for v in block.variables]


def _describe_layer(layer: keras.Layer) -> tuple[str, dict[str, Any], list[Any]]:
    config = {key: value for key, value in layer.get_config().items() if key != "name"}
    shapes = [(tuple(v.shape), v.dtype, v.trainable) for v in layer.variables]
    return type(layer).__name__, config, shapes
