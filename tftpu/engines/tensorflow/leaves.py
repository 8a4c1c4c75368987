"""Turns variables of Keras and TensorFlow into the leaves of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.engines.leaf import Leaf

Variable = Any  # a keras.Variable or a tf.Variable; TensorFlow publishes no types


def build_leaves(variables: Mapping[str, Sequence[Variable]]) -> dict[str, list[Leaf]]:
    """Returns the checkpoint leaves of variables, in the same groups and order."""
    return {group: [_build_leaf(v) for v in members] for group, members in variables.items()}


def _build_leaf(variable: Variable) -> Leaf:
    return Leaf.undivided(
        name=getattr(variable, "path", variable.name.removesuffix(":0")),
        shape=tuple(variable.shape),
        dtype=np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype).name,
        # On a CPU this is the memory of the variable itself, without a copy.
        read=lambda: np.asarray(tf.convert_to_tensor(variable)),
        assign=lambda value: variable.assign(value),
    )
