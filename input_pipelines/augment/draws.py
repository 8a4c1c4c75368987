"""Random numbers as a function of a seed alone: of one example, or of a whole batch at once.

TensorFlow's stateless ops take one seed a call, which is one call an example. These hash the seed,
what the numbers are for and their index (FarmHash, as in `epochs.py`), so that a batch is a call
too, and no number depends on which examples stand beside.
"""

import math
import zlib

import tensorflow as tf


def uniform(seeds: tf.Tensor, count: int, purpose: str) -> tf.Tensor:
    """Numbers of the uniform distribution on [0, 1).

    Args:
        seeds: (..., 2), int32; none or one leading dimension.
        count: how many for each seed.
        purpose: numbers for different purposes are independent, as "crop" and "flip".

    Returns:
        (..., count), float32, multiples of 2**-24.
    """
    pairs = -(-count // 2)  # a hash has 64 bits
    lead = tf.shape(seeds)[:-1]
    index = tf.stack([tf.fill((pairs,), _key(purpose)), tf.range(pairs)], axis=1)  # (pairs, 2)
    whole = tf.concat([lead, (pairs, 2)], 0)
    words = tf.concat(
        [tf.broadcast_to(seeds[..., None, :], whole), tf.broadcast_to(index, whole)], -1
    )  # (..., pairs, 4)
    hashed = tf.fingerprint(tf.reshape(tf.bitcast(words, tf.uint8), (-1, 16)))  # (-1, 8), uint8
    bits = tf.bitcast(tf.reshape(hashed, (-1, 2, 4)), tf.uint32)  # (-1, 2)
    numbers = tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32) * 2**-24
    numbers = tf.reshape(numbers, tf.concat([lead, (2 * pairs,)], 0))[..., :count]
    return tf.ensure_shape(numbers, (*seeds.shape[:-1], count))


def pixels(seed: tf.Tensor, shape: tuple[int, ...], purpose: str) -> tf.Tensor:
    """Random pixels, uint8, of a static shape, for one seed (2,), int32."""
    words = -(-math.prod(shape) // 4)
    drawn = tf.random.stateless_uniform(
        (words,), seed + _key(purpose), None, None, tf.int32, alg="philox"
    )
    return tf.reshape(tf.reshape(tf.bitcast(drawn, tf.uint8), [-1])[: math.prod(shape)], shape)


def between(low: float, high: float, numbers: tf.Tensor) -> tf.Tensor:
    """Uniform numbers on [0, 1) stretched to [low, high)."""
    return low + (high - low) * numbers


def beta(alpha: float, numbers: tf.Tensor) -> tf.Tensor:
    """Numbers of the distribution Beta(alpha, alpha).

    Devroye 1996, "Random variate generation in one line of code": a closed form for the symmetric
    case, where the usual ways reject and draw again, as often as the numbers want.

    Args:
        alpha: above 0.
        numbers: (..., 3), uniform on [0, 1).

    Returns:
        (...,), float32.
    """
    first, angle, side = tf.unstack(tf.cast(numbers, tf.float64), axis=-1)
    # 1 - first lies in (0, 1]: at 1 the spread is 0.
    spread = (tf.pow(1.0 - first, -1.0 / alpha) - 1.0) * tf.cos(2 * math.pi * angle) ** 2
    half = 0.5 * tf.sqrt(spread / (1.0 + spread))
    half = tf.where(tf.math.is_finite(spread), half, 0.5)
    return tf.cast(tf.where(side < 0.5, 0.5 - half, 0.5 + half), tf.float32)


def _key(purpose: str) -> tf.Tensor:
    return tf.constant(zlib.crc32(purpose.encode()) - 2**31, tf.int32)
