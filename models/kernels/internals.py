"""Private interfaces of TensorFlow that the kernels need: a function each, and nowhere else.

Tried with TensorFlow 2.19.1, 2.20.0 and 2.21.0. The tests of flash attention and of recomputed
blocks go through them.
"""

import tensorflow as tf


def reads_what_jax_writes() -> bool:
    """Whether this TensorFlow takes functions of this jax into its graphs.

    TensorFlow 2.19.1 takes those of jax 0.6.0, not of 0.10.2; 2.20.0 and 2.21.0 take both.
    """
    from jax import export
    from tensorflow.compiler.tf2xla.python import xla

    newest = xla.call_module_maximum_supported_version()
    return export.maximum_supported_calling_convention_version <= newest


def optimization_barrier(*tensors: tf.Tensor) -> list[tf.Tensor]:
    """The tensors as they are, none of which XLA takes to be there before all are."""
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return gen_xla_ops.xla_optimization_barrier(tensors)
