"""Computes the initial values that TensorFlow's random functions return for the same seed.

A model begins with the same weights on both engines. The host computes the values, one variable at
a time, and each device receives its shard. A variable that is loaded before the engine's scope ends
needs no initial value.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import keras_internals
from tftpu.engines.jax.placement import placing

# On TensorFlow, Keras takes seeds modulo this number, so that they fit into an int32.
_SEEDS = tf.int32.max - 1


@contextlib.contextmanager
def as_tensorflow() -> Iterator[None]:
    """Initializes variables created inside the `with` block as TensorFlow does for their seeds."""
    with keras_internals.random_initial_values(_compute_value):
        yield


def _compute_value(initializer: Any, shape: Sequence[int], dtype: str, layout: Any) -> Any:
    """Returns the value that an initializer computes under TensorFlow, sharded by `layout`."""

    def place_drawn(drawn: tf.Tensor) -> jax.Array:
        # If an initializer computes its value from random numbers of another shape, as for an
        # orthogonal matrix, the first device of each process computes the whole value.
        place = layout if tuple(drawn.shape) == tuple(shape) else None
        return placing.place_value(drawn.numpy(), place)

    def wrap_sampler(function: Callable[..., tf.Tensor]) -> Callable[..., jax.Array]:
        def draw(
            shape: Sequence[int], *args: Any, dtype: Any = None, seed: Any = None, **options: Any
        ) -> jax.Array:
            wanted = keras.backend.standardize_dtype(dtype)
            return place_drawn(function(shape, _draw_seed(seed), *args, dtype=wanted, **options))

        return draw

    # Computes the value at once, because a variable may be first read while a step is traced.
    with (
        jax.ensure_compile_time_eval(),
        keras_internals.random_functions(
            normal=wrap_sampler(tf.random.stateless_normal),
            truncated_normal=wrap_sampler(tf.random.stateless_truncated_normal),
            uniform=wrap_sampler(tf.random.stateless_uniform),
        ),
    ):
        return initializer(shape, dtype=dtype)


def _draw_seed(seed: Any) -> tf.Tensor:
    drawn = np.asarray(keras_internals.draw_seed(seed)).astype(np.int64)
    return tf.constant(drawn % _SEEDS, tf.int32)
