"""What is done to an image between the file and the batch, as `sources.Augment` says.

Training, in this order: a random crop, resized; flip; RandAugment; colours; erasing. Evaluation: a
central crop. All of it in uint8: a batch has a byte a value, and the model turns it into numbers of
about unit size on the device. Every random choice is a function of the seed that comes with the
example, which the run's seed, the epoch and the example make: neither the order of the work nor
the number of hosts changes it.

`mix.py` has what mixes examples with one another.
"""

from collections.abc import Callable

import tensorflow as tf

from tftpu.input_pipelines.augment import colors, decode, draws
from tftpu.input_pipelines.augment.randaugment import randaugment
from tftpu.input_pipelines.sources import Augment

ERASED = (0.02, 0.4)  # share of the image's area
ERASED_ASPECT = 1 / 0.3


def training(settings: Augment, size: int, channels: int) -> Callable:
    """A function of one example and its seed, for `tf.data.Dataset.map`.

    Args:
        settings: what is done, and how much.
        size: height and width of the image that comes out, in pixels.
        channels: 1 or 3, of the image that comes out.

    Returns:
        `({"image": ..., ...}, seed (2,) int32) -> {"image": (size, size, channels) uint8, ...}`;
        the image encoded, a scalar string, or decoded (height, width, channels), uint8.
    """

    def augmented(example: dict, seed: tf.Tensor) -> dict:
        # One call: beside decoding, what counts is the number of operations.
        numbers = draws.uniform(seed, decode.NUMBERS + 1, "crop and flip")

        def window(height, width):
            if not settings.crop:
                return decode.central_window(height, width, settings.eval_crop)
            areas = settings.min_area, 1.0
            return decode.random_window(height, width, numbers[1:], areas, settings.max_aspect)

        image = decode.cropped(example["image"], window, size, channels)
        if settings.flip:
            image = flip(image, numbers[0])
        return {**example, "image": changed(image, seed, settings)}

    return augmented


def evaluation(settings: Augment, size: int, channels: int) -> Callable:
    """A function of one example, as `training`: nothing is random."""

    def cropped(example: dict) -> dict:
        def window(height, width):
            return decode.central_window(height, width, settings.eval_crop)

        return {**example, "image": decode.cropped(example["image"], window, size, channels)}

    return cropped


def changed(image: tf.Tensor, seed: tf.Tensor, settings: Augment) -> tf.Tensor:
    """What is done to the pixels of one image after crop and flip, of static shape, uint8."""
    if settings.randaugment:
        image = randaugment(image, seed, settings.randaugment, settings.magnitude)
    if settings.jitter or settings.hue:
        image = colors.jitter(image, seed, settings.jitter, settings.hue)
    if settings.erasing:
        image = erase(image, seed, settings.erasing)
    return image


def flip(image: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Left and right exchanged, for the lower half of the numbers from 0 to 1."""
    return tf.cond(number < 0.5, lambda: tf.reverse(image, [1]), lambda: image)


def erase(image: tf.Tensor, seed: tf.Tensor, probability: float) -> tf.Tensor:
    """Random erasing (Zhong et al. 2017, https://arxiv.org/abs/1708.04896).

    A rectangle of 2 to 40 % of the area, its sides in a ratio of up to 1 / 0.3, is filled with
    random pixels.

    Args:
        image: (height, width, channels), uint8.
        seed: (2,), int32.
        probability: that anything is erased.
    """
    height, width = image.shape[:2]

    def erased() -> tf.Tensor:
        top, left, rows, columns = decode.random_window(
            tf.constant(height), tf.constant(width), numbers[1:], ERASED, ERASED_ASPECT
        )
        noise = draws.pixels(seed, tuple(image.shape), "erased pixels")
        return tf.where(inside(image, top, left, rows, columns), noise, image)

    numbers = draws.uniform(seed, decode.NUMBERS + 1, "erasing")
    return tf.cond(numbers[0] < probability, erased, lambda: image)


def inside(image: tf.Tensor, top, left, height, width) -> tf.Tensor:
    """Where a rectangle lies in an image, bool, (height, width, 1)."""
    y, x = tf.range(image.shape[0]), tf.range(image.shape[1])
    rows = (y >= top) & (y < top + height)
    columns = (x >= left) & (x < left + width)
    return (rows[:, None] & columns)[..., None]
