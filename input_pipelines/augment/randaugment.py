"""RandAugment: Cubuk et al. 2020, https://arxiv.org/abs/1909.13719.

`layers` of the fourteen operations, drawn with replacement, one after the other, all of one
magnitude M. At M = 10 an operation has the most that AutoAugment gives it; 0 is nothing, or nearly;
up to 30 the scale goes on, as the paper's larger networks use it:

    operation                                at M = 10
    identity, auto_contrast, equalize        no magnitude
    rotate                                   30 degrees
    shear_x, shear_y                         0.3
    translate_x, translate_y                 45 % of the side
    color, contrast, brightness, sharpness   a factor of 0.1 or 1.9; 1 is the image as it was
    posterize                                4 bits of 8 are left
    solarize                                 all pixels are inverted; at M = 5 those above 127

Directions (left or right, more or less) are drawn evenly. What moves into the image is grey, 128.
All of it is uint8 in and out, and gives what Pillow gives.
"""

import math

import tensorflow as tf

from tftpu.input_pipelines.augment import colors, draws

FILL = 128


def randaugment(image: tf.Tensor, seed: tf.Tensor, layers: int, magnitude: float) -> tf.Tensor:
    """The image after `layers` random operations.

    Args:
        image: (height, width, channels), uint8, 1 or 3 channels.
        seed: (2,), int32.
        layers: operations in a row.
        magnitude: of all of them, from 0 to 30.
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


def identity(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """The image as it is."""
    return tf.identity(image)


def auto_contrast(image: tf.Tensor, strength: tf.Tensor | None = None) -> tf.Tensor:
    """Each channel stretched so that its darkest pixel is 0 and its brightest 255."""
    # In float64, as Pillow: the table is cut down to whole levels.
    low = tf.cast(tf.reduce_min(image, (0, 1)), tf.float64)  # (channels,)
    high = tf.cast(tf.reduce_max(image, (0, 1)), tf.float64)
    scale = 255.0 / tf.maximum(high - low, 1.0)
    levels = tf.range(256, dtype=tf.float64)[:, None]
    table = tf.clip_by_value(tf.floor(levels * scale + -low * scale), 0.0, 255.0)
    table = tf.where(high > low, table, levels)  # a channel of one level stays
    return _by_table(image, tf.cast(table, tf.uint8))


def equalize(image: tf.Tensor, strength: tf.Tensor | None = None) -> tf.Tensor:
    """Each channel with its histogram made as flat as a table of levels can."""
    channels = image.shape[-1]
    shifted = tf.cast(image, tf.int32) + 256 * tf.range(channels)
    counts = tf.math.bincount(tf.reshape(shifted, [-1]), minlength=256 * channels)
    counts = tf.transpose(tf.reshape(counts, (channels, 256)))  # (256, channels)
    # The brightest level that occurs takes no part, as in Pillow.
    levels = tf.range(256)[:, None]
    brightest = tf.reduce_max(tf.where(counts > 0, levels, -1), 0)
    last = tf.reduce_sum(tf.where(levels == brightest, counts, 0), 0)
    step = (tf.reduce_sum(counts, 0) - last) // 255  # (channels,)
    below = tf.cumsum(counts, exclusive=True)
    table = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step > 0, table, levels)
    return _by_table(image, tf.cast(table, tf.uint8))


def rotate(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Turned about the centre, counterclockwise, by 30 degrees times the strength."""
    angle = strength * math.radians(30)
    cos, sin = tf.cos(angle), tf.sin(angle)
    return _affine(image, cos, -sin, sin, cos)


def shear_x(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Row y is moved by 0.3 times the strength times its distance from the middle."""
    return _affine(image, 1.0, 0.3 * strength, 0.0, 1.0)


def shear_y(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Column x is moved by 0.3 times the strength times its distance from the middle."""
    return _affine(image, 1.0, 0.0, 0.3 * strength, 1.0)


def translate_x(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Moved sideways by 45 % of the width times the strength, in whole pixels."""
    return _affine(image, 1.0, 0.0, 0.0, 1.0, right=tf.round(0.45 * strength * image.shape[1]))


def translate_y(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Moved up or down by 45 % of the height times the strength, in whole pixels."""
    return _affine(image, 1.0, 0.0, 0.0, 1.0, down=tf.round(0.45 * strength * image.shape[0]))


def color(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Between the image in grey and one of twice its saturation."""
    return colors.saturation(image, _factor(strength))


def contrast(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Between the image's mean grey and one of twice its contrast."""
    return colors.contrast(image, _factor(strength))


def brightness(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Between black and twice as bright."""
    return colors.brightness(image, _factor(strength))


def sharpness(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Between a smoothed image and one with its edges raised; the outermost pixels stay."""
    return colors.sharpness(image, _factor(strength))


def posterize(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """The upper 8 - 4 x |strength| bits of each pixel, at least one."""
    lost = tf.minimum(tf.cast(tf.round(4 * tf.abs(strength)), tf.uint8), 7)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, lost), lost)


def solarize(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Pixels of at least 256 x (1 - |strength|) inverted."""
    threshold = tf.round(256 * (1 - tf.abs(strength)))
    return tf.where(tf.cast(image, tf.float32) >= threshold, 255 - image, image)


OPERATIONS = {
    f.__name__: f
    for f in (
        *(identity, auto_contrast, equalize, rotate, solarize, color, posterize),
        *(contrast, brightness, sharpness, shear_x, shear_y, translate_x, translate_y),
    )
}


def _factor(strength: tf.Tensor) -> tf.Tensor:
    return tf.maximum(1.0 + 0.9 * strength, 0.0)


def _by_table(image: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """Each pixel replaced by the entry of its level and channel; table (256, channels)."""
    channels = image.shape[-1]
    index = tf.cast(image, tf.int32) * channels + tf.range(channels)
    return tf.gather(tf.reshape(table, [-1]), index)


def _affine(image, a, b, c, d, right=0.0, down=0.0) -> tf.Tensor:
    """The pixel at (x, y) from the middle comes from (a x + b y + right, c x + d y + down).

    The nearest pixel is taken, as by default in Pillow.
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
