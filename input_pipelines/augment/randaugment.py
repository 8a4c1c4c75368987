"""RandAugment: Cubuk et al. 2020, https://arxiv.org/abs/1909.13719.

Applies `layers` of fourteen operations, drawn with replacement, one after the other, all with the
same magnitude M. M = 10 is the maximum of AutoAugment, 0 is no or almost no change, and values up
to 30 extrapolate, as the paper's larger networks do:

    operation                                at M = 10
    identity, auto_contrast, equalize        no magnitude
    rotate                                   30 degrees
    shear_x, shear_y                         0.3
    translate_x, translate_y                 45 % of the side
    color, contrast, brightness, sharpness   a factor of 0.1 or 1.9; 1 is no change
    posterize                                4 bits of 8 are kept
    solarize                                 all pixels are inverted; at M = 5 those above 127

Directions (left or right, more or less) are equally likely. Empty areas are filled with grey, 128.
Images are uint8; the results equal Pillow's.
"""

import math

import tensorflow as tf

from tftpu.input_pipelines.augment import colors, draws
from tftpu.input_pipelines.tensors import Tensor

Number = float | Tensor

FILL = 128


def randaugment(image: Tensor, seed: Tensor, layers: int, magnitude: float) -> Tensor:
    """Applies `layers` random operations.

    Args:
        image: (height, width, channels), uint8, 1 or 3 channels.
        seed: (2,), int32.
        layers: number of operations.
        magnitude: the magnitude of all operations, from 0 to 30.
    """
    shape = image.shape
    numbers = draws.uniform(seed, 2 * layers, "randaugment")
    for layer in range(layers):
        choice = tf.cast(numbers[2 * layer] * len(OPERATIONS), tf.int32)
        sign = tf.where(numbers[2 * layer + 1] < 0.5, -1.0, 1.0)
        strength = sign * (magnitude / 10)
        branches = [
            lambda f=f, image=image, strength=strength: f(image, strength)
            for f in OPERATIONS.values()
        ]
        image = tf.ensure_shape(tf.switch_case(choice, branches), shape)
    return image


def identity(image: Tensor, strength: Tensor) -> Tensor:
    """Returns the image unchanged."""
    return tf.identity(image)


def auto_contrast(image: Tensor, strength: Tensor | None = None) -> Tensor:
    """Stretches each channel so that its darkest pixel is 0 and its brightest 255."""
    # float64 as in Pillow, because the table is truncated to whole levels.
    low: Tensor = tf.cast(tf.reduce_min(image, (0, 1)), tf.float64)  # (channels,)
    high: Tensor = tf.cast(tf.reduce_max(image, (0, 1)), tf.float64)
    scale = 255.0 / tf.maximum(high - low, 1.0)
    levels: Tensor = tf.range(256, dtype=tf.float64)[:, None]
    table = tf.clip_by_value(tf.floor(levels * scale + -low * scale), 0.0, 255.0)
    table = tf.where(high > low, table, levels)  # a channel of one level stays the same
    return _look_up_levels(image, tf.cast(table, tf.uint8))


def equalize(image: Tensor, strength: Tensor | None = None) -> Tensor:
    """Flattens the histogram of each channel with a lookup table of levels."""
    channels = image.shape[-1]
    shifted: Tensor = tf.cast(image, tf.int32) * channels + tf.range(channels)
    counts = tf.math.bincount(tf.reshape(shifted, [-1]), minlength=256 * channels)
    counts = tf.reshape(counts, (256, channels))
    # Pillow, too, leaves out the brightest level that occurs.
    levels = tf.range(256)[:, None]
    brightest = tf.reduce_max(tf.where(counts > 0, levels, -1), 0)
    last = tf.reduce_sum(tf.where(levels == brightest, counts, 0), 0)
    step = (tf.reduce_sum(counts, 0) - last) // 255  # (channels,)
    below = tf.cumsum(counts, exclusive=True)
    table = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step > 0, table, levels)
    return _look_up_levels(image, tf.cast(table, tf.uint8))


def rotate(image: Tensor, strength: Tensor) -> Tensor:
    """Rotates about the centre, counterclockwise, by 30 degrees times the strength."""
    angle = strength * math.radians(30)
    cos, sin = tf.cos(angle), tf.sin(angle)
    return _transform_affine(image, cos, -sin, sin, cos)


def shear_x(image: Tensor, strength: Tensor) -> Tensor:
    """Moves each row sideways by 0.3 times the strength times its distance from the middle."""
    return _transform_affine(image, 1.0, 0.3 * strength, 0.0, 1.0)


def shear_y(image: Tensor, strength: Tensor) -> Tensor:
    """Moves each column up or down by 0.3 times the strength times its distance from the middle."""
    return _transform_affine(image, 1.0, 0.0, 0.3 * strength, 1.0)


def translate_x(image: Tensor, strength: Tensor) -> Tensor:
    """Moves sideways by 45 % of the width times the strength, in whole pixels."""
    return _transform_affine(
        image, 1.0, 0.0, 0.0, 1.0, right=tf.round(0.45 * strength * image.shape[1])
    )


def translate_y(image: Tensor, strength: Tensor) -> Tensor:
    """Moves up or down by 45 % of the height times the strength, in whole pixels."""
    return _transform_affine(
        image, 1.0, 0.0, 0.0, 1.0, down=tf.round(0.45 * strength * image.shape[0])
    )


def color(image: Tensor, strength: Tensor) -> Tensor:
    """Changes the saturation, between grey and about twice as much."""
    return colors.saturation(image, _compute_factor(strength))


def contrast(image: Tensor, strength: Tensor) -> Tensor:
    """Changes the contrast, between the image's mean grey and about twice as much."""
    return colors.contrast(image, _compute_factor(strength))


def brightness(image: Tensor, strength: Tensor) -> Tensor:
    """Changes the brightness, between black and about twice as much."""
    return colors.brightness(image, _compute_factor(strength))


def sharpness(image: Tensor, strength: Tensor) -> Tensor:
    """Changes the sharpness, between smoothed and sharpened, except at the border."""
    return colors.sharpness(image, _compute_factor(strength))


def posterize(image: Tensor, strength: Tensor) -> Tensor:
    """Keeps the upper 8 - 4 x |strength| bits of each pixel, at least one."""
    lost = tf.minimum(tf.cast(tf.round(4 * tf.abs(strength)), tf.uint8), 7)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, lost), lost)


def solarize(image: Tensor, strength: Tensor) -> Tensor:
    """Inverts the values that are at least 256 x (1 - |strength|)."""
    threshold = tf.round(256 * (1 - tf.abs(strength)))
    return tf.where(tf.cast(image, tf.float32) >= threshold, 255 - image, image)


OPERATIONS = {
    f.__name__: f
    for f in (
        *(identity, auto_contrast, equalize, rotate, solarize, color, posterize),
        *(contrast, brightness, sharpness, shear_x, shear_y, translate_x, translate_y),
    )
}


def _compute_factor(strength: Tensor) -> Tensor:
    return tf.maximum(1.0 + 0.9 * strength, 0.0)


def _look_up_levels(image: Tensor, table: Tensor) -> Tensor:
    """Replaces each value by the table's entry for it and its channel; table: (256, channels)."""
    channels = image.shape[-1]
    index = tf.cast(image, tf.int32) * channels + tf.range(channels)
    return tf.gather(tf.reshape(table, [-1]), index)


def _transform_affine(
    image: Tensor,
    a: Number,
    b: Number,
    c: Number,
    d: Number,
    right: Number = 0.0,
    down: Number = 0.0,
) -> Tensor:
    """Moves the pixel from (a x + b y + right, c x + d y + down) to (x, y); (0, 0) is the middle.

    Takes the nearest pixel, the default of Pillow.
    """
    height, width = image.shape[:2]
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    a, b, c, d = (tf.convert_to_tensor(value, tf.float32) for value in (a, b, c, d))
    offset_x = right + middle_x - a * middle_x - b * middle_y
    offset_y = down + middle_y - c * middle_x - d * middle_y
    zero = tf.zeros(())
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=tf.stack([a, b, offset_x, c, d, offset_y, zero, zero])[None],
        output_shape=(height, width),
        fill_value=float(FILL),
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )
    return moved[0]
