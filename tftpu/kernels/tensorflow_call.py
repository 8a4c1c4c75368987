"""Kernels in a TensorFlow program: jax2tf makes a JAX function an op of the graph."""

import os
from collections.abc import Callable

import tensorflow as tf

from tftpu.errors import UserError
from tftpu.kernels import internals


def prepare() -> None:
    """Restricts JAX to the CPU, for tracing, because TensorFlow holds this process's TPU.

    Raises:
        ImportError: jax is not installed.
        UserError: this TensorFlow cannot read the programs that this jax writes.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not internals.can_embed_jax():
        raise UserError(
            f"model.attention='flash': TensorFlow {tf.__version__} cannot read the programs that "
            "this jax writes. Run `pip install jax==0.6.0 jaxlib==0.6.0`, or use "
            "model.attention='plain'."
        )


def call(function: Callable) -> Callable:
    """Returns a JAX function as one op, compiled for TPUs only and without a gradient."""
    from jax.experimental import jax2tf

    return jax2tf.convert(
        function,
        with_gradient=False,
        native_serialization_platforms=("tpu",),
        # The platform check is off, because preflight compiles on a machine without a TPU. Callers
        # have checked `sharding.get_platform()`.
        native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
    )
