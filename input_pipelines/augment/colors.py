"""Brightness, contrast, saturation, sharpness and hue of uint8 images, like Pillow's ImageEnhance.

A factor of 1 leaves an image unchanged, 0 removes the property (black, grey, smooth), and factors
above 1 enhance it.
"""

import tensorflow as tf

from tftpu.input_pipelines.augment import draws
from tftpu.input_pipelines.tensors import Tensor


def jitter(image: Tensor, seed: Tensor, strength: float, hue_strength: float) -> Tensor:
    """Applies random brightness, contrast, saturation and (with 3 channels) hue, in this order.

    Args:
        image: (height, width, channels), uint8, 1 or 3 channels.
        seed: (2,), int32.
        strength: the three factors are uniform on [1 - strength, 1 + strength], but never below 0.
        hue_strength: the rotation of the hue is uniform on [-hue_strength, hue_strength]; 0.5 is
            half the circle.
    """
    numbers = draws.uniform(seed, 4, "colors")
    if strength:
        factors = draws.scale_to_range(max(1 - strength, 0), 1 + strength, numbers)
        image = brightness(image, factors[0])
        image = contrast(image, factors[1])
        image = saturation(image, factors[2])
    if hue_strength and image.shape[-1] == 3:
        image = hue(image, draws.scale_to_range(-hue_strength, hue_strength, numbers[3]))
    return image


def brightness(image: Tensor, factor: Tensor) -> Tensor:
    """Multiplies every pixel by the factor."""
    return blend(0.0, image, factor)


def contrast(image: Tensor, factor: Tensor) -> Tensor:
    """Multiplies every pixel's distance from the image's mean grey level by the factor."""
    mean = tf.floor(tf.reduce_mean(tf.cast(grey(image), tf.float32)) + 0.5)
    return blend(mean, image, factor)


def saturation(image: Tensor, factor: Tensor) -> Tensor:
    """Multiplies every pixel's distance from its grey level by the factor."""
    return blend(tf.cast(grey(image), tf.float32), image, factor)


def sharpness(image: Tensor, factor: Tensor) -> Tensor:
    """Multiplies every inner pixel's distance from the smoothed image by the factor."""
    channels = image.shape[-1]
    kernel: Tensor = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], tf.float32) / 13
    kernel = tf.tile(kernel[..., None, None], (1, 1, channels, 1))
    pixels = tf.cast(image, tf.float32)
    smooth = tf.nn.depthwise_conv2d(pixels[None], kernel, (1, 1, 1, 1), "VALID")[0]
    smooth = tf.floor(smooth + 0.5)
    inner: Tensor = tf.ones(tf.shape(smooth)[:2], tf.bool)
    inner = inner[..., None]
    around = ((1, 1), (1, 1), (0, 0))
    smooth = tf.where(tf.pad(inner, around), tf.pad(smooth, around), pixels)
    return blend(smooth, image, factor)


def hue(image: Tensor, turn: Tensor) -> Tensor:
    """Rotates the hue of every RGB pixel by `turn`, a share of the circle."""
    return tf.image.adjust_hue(image, turn)


def grey(image: Tensor) -> Tensor:
    """Returns grey levels by ITU-R 601-2, (height, width, 1), int32, rounded as in Pillow."""
    pixels = tf.cast(image, tf.int32)
    if image.shape[-1] == 1:
        return pixels
    weighted = tf.reduce_sum(pixels * (19595, 38470, 7471), -1, keepdims=True)
    return tf.bitwise.right_shift(weighted + 2**15, 16)


def blend(other: Tensor | float, image: Tensor, factor: Tensor) -> Tensor:
    """Returns other + factor x (image - other), clipped to [0, 255] and truncated as in Pillow.

    Args:
        other: float32, broadcast to the image.
        image: (height, width, channels), uint8.
        factor: 0 gives `other`, 1 the image; above 1 extrapolates.
    """
    pixels: Tensor = tf.cast(image, tf.float32)
    return tf.cast(tf.clip_by_value(other + factor * (pixels - other), 0.0, 255.0), tf.uint8)
