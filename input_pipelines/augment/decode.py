"""Encoded or decoded images as uint8 pixels of static shape: decode, crop, resize.

For a JPEG, only the rows and blocks that the crop needs are decoded. If the crop is at least twice
the size of the result, this is done at 1/2, 1/4 or 1/8 of the resolution, which is faster and
aliases less. Every other image is decoded completely: PNGs, and JPEGs with bytes after their end,
by TensorFlow; JPEGs in CMYK, PNGs with EXIF data, and other formats by Pillow (`formats.pillow`).
Images are turned upright according to their EXIF data or XMP. An exported graph has no Pillow, so
it raises an error for images that only Pillow decodes (`refuse_rest`).

Decoding is exact (accurate integer DCT, smooth chroma), in training and evaluation: the fast
approximations save no measurable time. If a JPEG stores colours at half the resolution, the last
column of a crop differs slightly in colour from the complete image, because its neighbour is not
decoded.

Resizing is bilinear with pixel centres at halves, rounded to uint8, without a filter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.input_pipelines.augment import draws, orientation
from tftpu.input_pipelines.formats import pillow
from tftpu.input_pipelines.tensors import Tensor, skip_autograph

ATTEMPTS = 10  # attempts to find a random crop that fits into the image
NUMBERS = 2 * ATTEMPTS + 2  # random numbers that a crop needs
# Matches a PNG that may state an orientation where Pillow reads it.
_MAY_BE_TURNED = r"\C*(eXIf|Raw profile type|XML:com\.adobe\.xmp)\C*"

Window = tuple[Tensor, Tensor, Tensor, Tensor]  # top, left, height, width; int32
Decode = Callable[[Tensor, int], Tensor]  # maps an encoded image and its channels to pixels


def draw_random_window(
    height: Tensor,
    width: Tensor,
    numbers: Tensor,
    areas: tuple[float, float] = (0.08, 1.0),
    max_aspect: float = 4 / 3,
) -> Window:
    """Returns the random crop of Inception (Szegedy et al. 2014, https://arxiv.org/abs/1409.4842).

    Its share of the image's area is uniform on `areas` and the logarithm of its aspect ratio is
    uniform, given that it fits into the image; its position is uniform. If none of ten draws fits,
    the first is reduced to the largest size that the aspect ratios allow.

    Args:
        height, width: of the image, int32.
        numbers: (`NUMBERS`,), uniform on [0, 1).
        areas: smallest and largest share of the image's area, in (0, 1].
        max_aspect: longer side over shorter side of the crop, 1 or more.
    """
    sides = tf.sqrt(draws.scale_to_range(*areas, numbers[:ATTEMPTS]))
    # The square root of the aspect ratio, uniform in the logarithm.
    roots = max_aspect ** (numbers[ATTEMPTS : 2 * ATTEMPTS] - 0.5)
    image = tf.cast(tf.stack([height, width]), tf.float32)
    drawn = tf.stack([sides / roots, sides * roots], 1) * tf.sqrt(tf.reduce_prod(image))
    fits = tf.reduce_all(drawn < image + 0.5, axis=1)
    first = tf.gather(drawn, tf.argmax(fits))  # the first that fits; the first of all if none does
    largest = tf.minimum(image, image[::-1] * max_aspect)
    size = tf.maximum(tf.round(tf.minimum(first, largest)), 1.0)
    place = tf.floor(numbers[2 * ATTEMPTS :] * (image - size + 1.0))
    window = tf.cast(tf.concat([place, size], 0), tf.int32)
    return window[0], window[1], window[2], window[3]


def find_central_window(height: Tensor, width: Tensor, share: float) -> Window:
    """Returns the central square whose side is a share of the image's shorter side."""
    side = tf.round(share * tf.cast(tf.minimum(height, width), tf.float32))
    side = tf.maximum(tf.cast(side, tf.int32), 1)
    return (height - side) // 2, (width - side) // 2, side, side


def find_central_square(height: Tensor, width: Tensor) -> Window:
    """Returns the largest central square."""
    return find_central_window(height, width, 1.0)


@skip_autograph
def crop_and_resize(
    image: Tensor,
    window: Callable[[Tensor, Tensor], Window],
    size: int,
    channels: int,
    decode_rest: Decode | None = None,
) -> Tensor:
    """Crops an image and resizes the crop to (size, size, channels), uint8.

    Args:
        image: encoded, a scalar string; or decoded, (height, width, channels), uint8.
        window: a function that maps (height, width) of the upright image to the crop.
        size: height and width of the result, in pixels.
        channels: the number of channels of the result: 3, or 1 for grey levels; images are
            converted.
        decode_rest: see `decode_image`.

    Raises:
        tf.errors.InvalidArgumentError: at run time, for a broken or truncated image.
    """
    if image.dtype != tf.string:
        return resize_square(_slice_window(to_channels(image, channels), window), size)

    # Computed once, not in each branch: a pass over a data set starts by building every branch.
    is_jpeg = _is_plain_jpeg(image)
    number = _read_orientation(image, is_jpeg)

    def decode_fused() -> Tensor:
        shape = tf.image.extract_jpeg_shape(image)
        # (height, width) of the upright image
        upright = tf.where(number >= 5, shape[1::-1], shape[:2])
        place = tf.stack(window(upright[0], upright[1]))
        place = _locate_in_file(place, upright, number)
        shorter = tf.minimum(place[2], place[3])

        def decode_at(ratio: int) -> Tensor:
            return _decode_part(image, place, ratio, channels)

        def decode_smaller() -> Tensor:
            return tf.cond(
                shorter < 4 * size,
                lambda: decode_at(2),
                lambda: tf.cond(shorter < 8 * size, lambda: decode_at(4), lambda: decode_at(8)),
            )

        pixels = tf.cond(shorter < 2 * size, lambda: decode_at(1), decode_smaller)
        # Resizing float32 gives the same bits faster than uint8; the crop is small here.
        pixels = resize_square(tf.cast(pixels, tf.float32), size)
        return _turn_upright(pixels, number)

    def decode_whole() -> Tensor:
        pixels = _decode_upright(image, channels, decode_rest, is_jpeg, number)
        return resize_square(_slice_window(pixels, window), size)

    # A decoder that stops below the crop would not notice that the end of a file is missing.
    ends = tf.equal(_slice_end(image, 2), b"\xff\xd9")
    pixels = tf.cond(is_jpeg & ends, decode_fused, decode_whole)
    return tf.ensure_shape(pixels, (size, size, channels))


@skip_autograph
def decode_image(image: Tensor, channels: int, decode_rest: Decode | None = None) -> Tensor:
    """Decodes an image of any format that `formats.pillow` reads, upright.

    Args:
        image: encoded, a scalar string.
        channels: the number of channels of the result: 3, or 1 for grey levels; images are
            converted.
        decode_rest: a function that decodes the images that TensorFlow cannot decode; None: Pillow,
            in this process. See `refuse_rest`.

    Returns:
        (height, width, channels), uint8.
    """
    is_jpeg = _is_plain_jpeg(image)
    number = _read_orientation(image, is_jpeg)
    return _decode_upright(image, channels, decode_rest, is_jpeg, number)


def _decode_upright(
    image: Tensor, channels: int, decode_rest: Decode | None, is_jpeg: Tensor, number: Tensor
) -> Tensor:
    """Decodes an image as `decode_image`; `number`: its orientation, see `_read_orientation`."""

    def decode_jpeg() -> Tensor:
        pixels = tf.io.decode_jpeg(image, channels, dct_method="INTEGER_ACCURATE")
        return _turn_upright(pixels, number)

    def decode_other() -> Tensor:
        rest = decode_rest or _decode_with_pillow
        return tf.cond(
            _is_plain_png(image),
            lambda: tf.io.decode_png(image, channels),
            lambda: rest(image, channels),
        )

    pixels = tf.cond(is_jpeg, decode_jpeg, decode_other)
    return tf.ensure_shape(pixels, (None, None, channels))


def refuse_rest(image: Tensor, channels: int) -> Tensor:
    """Raises an error for any image: the `decode_rest` of exported graphs, which have no Pillow.

    Raises:
        tf.errors.InvalidArgumentError: at run time.
    """
    said = (
        "This model decodes only JPEG in grey or RGB, and PNG without EXIF data or XMP, with up to "
        f"{pillow.MAX_PIXELS:,} pixels: convert the file to one of these formats."
    )
    with tf.control_dependencies([tf.debugging.Assert(False, [said])]):
        return tf.zeros((1, 1, channels), tf.uint8)


def explain_failure(image: bytes) -> str:
    """Returns why an image cannot be decoded, as the end of a sentence; "" if it can be decoded."""
    try:
        decode_image(tf.constant(image), 3)
    except ValueError as error:  # raised by Pillow
        return str(error).partition("\nTraceback")[0]
    except tf.errors.OpError as error:
        said = error.message.partition("}} ")[2] or error.message
        return f"cannot be decoded ({said.partition(' [Op:')[0]})"
    return ""


def to_channels(image: Tensor, channels: int) -> Tensor:
    """Converts a decoded image to 1 or 3 channels."""
    if image.shape[-1] == channels:
        return image
    if channels == 1:
        return tf.image.rgb_to_grayscale(image)
    return tf.image.grayscale_to_rgb(image)


def resize_square(image: Tensor, size: int) -> Tensor:
    """Resizes (height, width, channels), uint8 or float32, to (size, size, channels), uint8."""
    pixels = tf.raw_ops.ResizeBilinear(
        images=image[None], size=(size, size), half_pixel_centers=True
    )
    # The sum reuses the memory of `pixels`. The sum of a slice, `pixels[0] + 0.5`, could not.
    return tf.squeeze(tf.cast(pixels + 0.5, tf.uint8), 0)


def _decode_with_pillow(image: Tensor, channels: int) -> Tensor:
    """Decodes an image with Pillow, in a Python function that must run in this process."""

    # `value` is bytes, or outside a graph an array of bytes
    def read_pixels(value: Any) -> np.ndarray:
        return pillow.read_pixels(np.asarray(value, object).item(), channels)

    return tf.numpy_function(read_pixels, [image], tf.uint8)


def _read_orientation(image: Tensor, is_jpeg: Tensor) -> Tensor:
    """Returns the orientation in a JPEG's metadata, (), int32; 1 (upright) for other formats."""
    # Few JPEGs have metadata, and reading them takes many operations. Metadata come first, or right
    # after the JFIF segment.
    head = tf.io.decode_raw(tf.strings.substr(image, 0, 24), tf.uint8)
    head = tf.cast(tf.pad(head, [[0, 24 - tf.size(head)]]), tf.int32)
    has_jfif = head[3] == 0xE0
    marker = tf.where(has_jfif, head[21], head[3])
    stated = _is_one_of(marker, 0xFE, *range(0xE1, 0xF0)) | (has_jfif & (head[5] != 16))
    return tf.cond(is_jpeg & stated, lambda: orientation.read_orientation(image), lambda: 1)


def _is_one_of(number: Tensor, *numbers: int) -> Tensor:
    return tf.reduce_any(number == numbers)


def _turn_upright(pixels: Tensor, number: Tensor) -> Tensor:
    """Turns the pixels of a file, (height, width, channels), upright; `number`: the orientation."""

    def turn() -> Tensor:
        # tf.transpose of integers prints an error of TensorFlow's oneDNN, although it works.
        height, width, channels = tf.unstack(tf.shape(pixels))
        transposed = number >= 5
        rows = tf.range(tf.where(transposed, width, height))  # of the upright image
        columns = tf.range(tf.where(transposed, height, width))
        rows = tf.where(_is_one_of(number, 3, 4, 7, 8), rows[::-1], rows)[:, None]
        columns = tf.where(_is_one_of(number, 2, 3, 6, 7), columns[::-1], columns)
        places = tf.where(transposed, columns * width + rows, rows * width + columns)
        return tf.gather(tf.reshape(pixels, (height * width, channels)), places)

    return tf.cond(number > 1, turn, lambda: pixels)


def _locate_in_file(place: Tensor, size: Tensor, number: Tensor) -> Tensor:
    """Converts a window of the upright image to the same window of the file's stored pixels.

    Args:
        place: top, left, height, width of the window.
        size: height and width of the upright image.
        number: the orientation.
    """
    flips = tf.stack([_is_one_of(number, 3, 4, 7, 8), _is_one_of(number, 2, 3, 6, 7)])
    corner = tf.where(flips, size - place[:2] - place[2:], place[:2])
    # Not place[:1:-1]: TensorFlow's optimizer of layouts would print an error about such a slice.
    transposed = tf.concat([corner[::-1], place[3:1:-1]], 0)
    return tf.where(number >= 5, transposed, tf.concat([corner, place[2:]], 0))


def _is_plain_jpeg(image: Tensor) -> Tensor:
    """Returns whether an image is a grey or RGB JPEG of at most `pillow.MAX_PIXELS` pixels."""

    def is_plain() -> Tensor:
        shape = tf.image.extract_jpeg_shape(image, tf.int64)
        return (shape[0] * shape[1] <= pillow.MAX_PIXELS) & (shape[2] < 4)

    found = tf.equal(tf.strings.substr(image, 0, 3), pillow.JPEG)
    return tf.cond(found, is_plain, lambda: tf.constant(False))


def _is_plain_png(image: Tensor) -> Tensor:
    """Returns whether an image is a PNG of at most `MAX_PIXELS` that states no orientation."""

    def is_plain() -> Tensor:
        head = tf.strings.substr(image, 0, 4096)
        # Metadata precede or follow the pixels (IDAT). If the pixels begin early, only the two ends
        # of the file are searched.
        few_metadata = tf.strings.regex_full_match(head, r"\C*IDAT\C*")
        searched = tf.where(few_metadata, head + _slice_end(image, 4096), image)
        stated = tf.strings.regex_full_match(searched, _MAY_BE_TURNED)
        sizes = tf.io.decode_raw(tf.strings.substr(image, 16, 8), tf.int32, little_endian=False)
        few = tf.reduce_prod(tf.cast(sizes, tf.int64)) <= pillow.MAX_PIXELS
        return few & ~stated

    found = tf.equal(tf.strings.substr(image, 0, 8), pillow.PNG)
    found &= tf.strings.length(image) >= 24
    return tf.cond(found, is_plain, lambda: tf.constant(False))


def _slice_end(text: Tensor, size: int) -> Tensor:
    """Returns the last `size` bytes of a text, or all bytes if it is shorter."""
    length = tf.strings.length(text)
    return tf.strings.substr(text, tf.maximum(length - size, 0), size)


def _slice_window(image: Tensor, window: Callable[[Tensor, Tensor], Window]) -> Tensor:
    shape = tf.shape(image)
    top, left, height, width = window(shape[0], shape[1])
    return image[top : top + height, left : left + width]


def _decode_part(image: Tensor, place: Tensor, ratio: int, channels: int) -> Tensor:
    """Decodes a window of a JPEG at 1/ratio of its resolution; `place` is at full resolution."""
    return tf.raw_ops.DecodeAndCropJpeg(
        contents=image,
        crop_window=place // ratio,
        channels=channels,
        ratio=ratio,
        dct_method="INTEGER_ACCURATE",
    )
