"""The private interfaces of TensorFlow that the kernels use, each behind one function.

Tested with TensorFlow 2.19.1, 2.20.0 and 2.21.0, by the tests of flash attention and of recomputed
blocks.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def can_embed_jax() -> bool:
    """Returns whether this TensorFlow can embed functions of this jax in its graphs.

    TensorFlow 2.19.1 can embed those of jax 0.6.0, but not of 0.10.2; 2.20.0 and 2.21.0 can embed
    both.
    """
    from jax import export
    from tensorflow.compiler.tf2xla.python import xla

    newest = xla.call_module_maximum_supported_version()
    return export.maximum_supported_calling_convention_version <= newest


def optimization_barrier(*tensors: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors unchanged; XLA computes all of them before it uses any."""
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    barrier: Callable[..., Any] = gen_xla_ops.xla_optimization_barrier
    return barrier(tensors)
