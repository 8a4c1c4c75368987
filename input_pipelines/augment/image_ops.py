"""The augmentation of single images, according to `settings.Augment`.

Training, in this order: a random crop, resized; flip; RandAugment; colours; erasing. Evaluation: a
central crop. Everything is in uint8, one byte per value; pipelines scale the finished batch. Every
random choice is a function of the example's seed, which depends on the run's seed, the epoch and
the example: neither the order of the work nor the number of hosts changes it.

`mix` has the functions that mix examples with one another.
"""

from collections.abc import Callable

import tensorflow as tf

from tftpu.input_pipelines.augment import colors, decode, draws
from tftpu.input_pipelines.augment.randaugment import randaugment
from tftpu.input_pipelines.augment.settings import Augment
from tftpu.input_pipelines.tensors import Tensor

Example = dict[str, Tensor]

ERASED = (0.02, 0.4)  # range of the erased rectangle, as shares of the image's area
ERASED_ASPECT = 1 / 0.3


def build_training_augmentation(
    settings: Augment, size: int, channels: int
) -> Callable[[Example, Tensor], Example]:
    """Returns a function that augments a training example, for `tf.data.Dataset.map`.

    Args:
        settings: the settings of the augmentation.
        size: height and width of the resulting image, in pixels.
        channels: the number of channels of the resulting image, 1 or 3.

    Returns:
        `({"image": ..., ...}, seed (2,) int32) -> {"image": (size, size, channels) uint8, ...}`;
        the image is encoded, a scalar string, or decoded, (height, width, channels), uint8.
    """

    def augment_example(example: Example, seed: Tensor) -> Example:
        # One call draws all numbers: apart from decoding, the number of operations determines the
        # time.
        numbers = draws.uniform(seed, decode.NUMBERS + 1, "crop and flip")

        def choose_window(height: Tensor, width: Tensor) -> decode.Window:
            if not settings.crop:
                return decode.find_central_window(height, width, settings.central_side)
            areas = settings.min_area, 1.0
            return decode.draw_random_window(height, width, numbers[1:], areas, settings.max_aspect)

        image = decode.crop_and_resize(example["image"], choose_window, size, channels)
        if settings.flip:
            image = flip(image, numbers[0])
        return {**example, "image": augment_image(image, seed, settings)}

    return augment_example


def build_evaluation_crop(
    settings: Augment, size: int, channels: int, decode_rest: decode.Decode | None = None
) -> Callable[[Example], Example]:
    """Returns a function that crops the image of an evaluation example to its centre.

    Arguments as for `build_training_augmentation`; for `decode_rest`, see `decode.decode_image`.
    """

    def crop_example(example: Example) -> Example:
        def choose_window(height: Tensor, width: Tensor) -> decode.Window:
            return decode.find_central_window(height, width, settings.central_side)

        image = decode.crop_and_resize(example["image"], choose_window, size, channels, decode_rest)
        return {**example, "image": image}

    return crop_example


def augment_image(image: Tensor, seed: Tensor, settings: Augment) -> Tensor:
    """Applies the augmentation that follows crop and flip to an image of static shape, uint8."""
    if settings.randaugment:
        image = randaugment(image, seed, settings.randaugment, settings.magnitude)
    if settings.jitter or settings.hue:
        image = colors.jitter(image, seed, settings.jitter, settings.hue)
    if settings.erasing:
        image = erase(image, seed, settings.erasing)
    return image


def flip(image: Tensor, number: Tensor) -> Tensor:
    """Mirrors an image left to right if `number`, uniform on [0, 1), is below 0.5."""
    return tf.cond(number < 0.5, lambda: tf.reverse(image, [1]), lambda: image)


def erase(image: Tensor, seed: Tensor, probability: float) -> Tensor:
    """Fills a random rectangle with noise (Zhong et al. 2017, https://arxiv.org/abs/1708.04896).

    The rectangle covers 2 to 40 % of the area, with an aspect ratio of up to 1 / 0.3.

    Args:
        image: (height, width, channels), uint8.
        seed: (2,), int32.
        probability: the probability that a rectangle is erased.
    """
    height, width = image.shape[:2]

    def erase_rectangle() -> Tensor:
        top, left, rows, columns = decode.draw_random_window(
            tf.constant(height), tf.constant(width), numbers[1:], ERASED, ERASED_ASPECT
        )
        noise = draws.draw_pixels(seed, tuple(image.shape), "erased pixels")
        return tf.where(mask_rectangle(image, top, left, rows, columns), noise, image)

    numbers = draws.uniform(seed, decode.NUMBERS + 1, "erasing")
    return tf.cond(numbers[0] < probability, erase_rectangle, lambda: image)


def mask_rectangle(
    image: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor
) -> Tensor:
    """Returns a mask of a rectangle in an image, bool, (height, width, 1)."""
    y, x = tf.range(image.shape[0]), tf.range(image.shape[1])
    rows = (y >= top) & (y < top + height)
    columns = (x >= left) & (x < left + width)
    return (rows[:, None] & columns)[..., None]
