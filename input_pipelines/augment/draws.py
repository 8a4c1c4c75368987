"""Random numbers that depend only on a seed: for one example, or for a batch at once.

TensorFlow's stateless ops take one seed per call, which would mean one call per example. These
functions hash the seed, the purpose of the numbers and their index (FarmHash, as in
`reading.order`), so that one call serves a batch, and no number depends on the other examples.
"""

import math
import zlib
from typing import Any

import tensorflow as tf

from tftpu.input_pipelines.tensors import Tensor


def uniform(seeds: Tensor, count: int, purpose: str) -> Tensor:
    """Returns uniform numbers on [0, 1).

    Args:
        seeds: (..., 2), int32; at most one leading dimension.
        count: how many numbers each seed gives.
        purpose: the use of the numbers, such as "crop". Numbers for different purposes are
            independent.

    Returns:
        (..., count), float32, multiples of 2**-24.
    """
    pairs = -(-count // 2)  # each hash of 64 bits gives two numbers
    lead = tf.shape(seeds)[:-1]
    index = tf.stack(
        [tf.fill((pairs,), _derive_key(purpose)), tf.range(pairs)], axis=1
    )  # (pairs, 2)
    whole = tf.concat([lead, (pairs, 2)], 0)
    words = tf.concat(
        [tf.broadcast_to(seeds[..., None, :], whole), tf.broadcast_to(index, whole)], -1
    )  # (..., pairs, 4)
    hashed = tf.fingerprint(tf.reshape(tf.bitcast(words, tf.uint8), (-1, 16)))  # (-1, 8), uint8
    bits = tf.bitcast(tf.reshape(hashed, (-1, 2, 4)), tf.uint32)  # (-1, 2)
    numbers: Tensor = (
        tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32) * 2**-24
    )
    numbers = tf.reshape(numbers, tf.concat([lead, (2 * pairs,)], 0))
    return tf.ensure_shape(numbers[..., :count], (*seeds.shape[:-1], count))


def draw_pixels(seed: Tensor, shape: tuple[int, ...], purpose: str) -> Tensor:
    """Returns random pixels, uint8, of a static shape, for one seed (2,), int32."""
    words = -(-math.prod(shape) // 4)
    full: Any = None  # None draws from the whole range of the dtype
    drawn = tf.random.stateless_uniform(
        (words,), seed + _derive_key(purpose), full, full, tf.int32, alg="philox"
    )
    return tf.reshape(tf.reshape(tf.bitcast(drawn, tf.uint8), [-1])[: math.prod(shape)], shape)


def scale_to_range(low: float, high: float, numbers: Tensor) -> Tensor:
    """Scales uniform numbers on [0, 1) to [low, high)."""
    return low + (high - low) * numbers


def beta(alpha: float, numbers: Tensor) -> Tensor:
    """Returns numbers from the distribution Beta(alpha, alpha).

    Devroye 1996, "Random variate generation in one line of code": a closed form for the symmetric
    case. Other methods reject and draw again, an unlimited number of times.

    Args:
        alpha: above 0.
        numbers: (..., 3), uniform on [0, 1).

    Returns:
        (...,), float32.
    """
    first, angle, side = tf.unstack(tf.cast(numbers, tf.float64), axis=-1)
    # `1 - first` is never 0, unlike `first`, so the power never divides by 0.
    spread = (tf.pow(1.0 - first, -1.0 / alpha) - 1.0) * tf.cos(2 * math.pi * angle) ** 2
    half = 0.5 * tf.sqrt(spread / (1.0 + spread))
    half = tf.where(tf.math.is_finite(spread), half, 0.5)
    return tf.cast(tf.where(side < 0.5, 0.5 - half, 0.5 + half), tf.float32)


def _derive_key(purpose: str) -> Tensor:
    return tf.constant(zlib.crc32(purpose.encode()) - 2**31, tf.int32)
