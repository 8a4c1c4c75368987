"""Image files of all common formats, as strangers write them, against Pillow and plain arrays."""

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.support.data import photos
from tftpu.input_pipelines.augment import decode
from tftpu.input_pipelines.formats import pillow

COLOURS = photos.pixels(24, 40)
GREY = COLOURS[..., 0]


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@tf.function(input_signature=[tf.TensorSpec((), tf.string)])
def in_colours(data: tf.Tensor) -> tf.Tensor:
    return decode.decode_image(data, 3)


def frames(kind: str, **options) -> bytes:
    first, second = (Image.fromarray(np.full((24, 40, 3), grey, np.uint8)) for grey in (40, 200))
    return saved(first, kind, save_all=True, append_images=[second], **options)


PALETTE = Image.fromarray(COLOURS).quantize(64)
OF_PALETTE = np.asarray(PALETTE.convert("RGB"))
SIXTEEN = Image.fromarray(GREY.astype(np.uint16) << 8 | 77)
OPAQUE = np.dstack([COLOURS, GREY])  # with transparency
FILES = {
    "WebP": (saved(Image.fromarray(COLOURS), "WEBP", lossless=True), COLOURS),
    "TIFF": (saved(Image.fromarray(COLOURS), "TIFF", compression="tiff_lzw"), COLOURS),
    "BMP": (saved(Image.fromarray(COLOURS), "BMP"), COLOURS),
    "BMP with a palette": (saved(PALETTE, "BMP"), OF_PALETTE),
    "PNG with a palette": (saved(PALETTE, "PNG", transparency=0), OF_PALETTE),
    "GIF": (saved(PALETTE, "GIF"), OF_PALETTE),
    "PNG of 16 bits": (saved(SIXTEEN, "PNG"), GREY[..., None].repeat(3, -1)),
    "TIFF of 16 bits": (saved(SIXTEEN, "TIFF"), GREY[..., None].repeat(3, -1)),
    "PNG with transparency": (saved(Image.fromarray(OPAQUE), "PNG"), COLOURS),
    "WebP with transparency": (
        saved(Image.fromarray(OPAQUE), "WEBP", lossless=True, exact=True),
        COLOURS,
    ),
    "animated GIF": (frames("GIF"), np.full((24, 40, 3), 40)),
    "animated WebP": (frames("WEBP", lossless=True), np.full((24, 40, 3), 40)),
    "TIFF of several pages": (frames("TIFF"), np.full((24, 40, 3), 40)),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_format_gives_the_pixels_that_were_saved(kind):
    data, expected = FILES[kind]
    assert (in_colours(tf.constant(data)).numpy() == expected).all()
    stored = pillow.to_png(data)
    assert (in_colours(tf.constant(stored)).numpy() == expected).all()
    assert decode.explain_failure(data) == ""


@pytest.mark.parametrize("channels", [1, 3])
def test_a_jpeg_in_cmyk_has_the_colours_that_pillow_gives_it(channels):
    data = saved(Image.fromarray(COLOURS).convert("CMYK"), "JPEG", quality=95)
    theirs = np.asarray(Image.open(io.BytesIO(data)).convert("L" if channels == 1 else "RGB"))
    ours = decode.decode_image(tf.constant(data), channels).numpy()
    assert (ours == theirs.reshape(ours.shape)).all()


def bits_of_32() -> bytes:
    return saved(Image.fromarray(GREY.astype(np.float32) / 255), "TIFF")


@pytest.mark.filterwarnings("ignore")  # of Pillow, before it fails
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: b"", "is empty"),
        (lambda: b"<html>", "is not an image that can be read (JPEG, PNG, GIF, BMP, WEBP, TIFF)"),
        (lambda: FILES["TIFF"][0][:-40], "is not an image that can be read ("),
        (lambda: FILES["GIF"][0][:-40], "cannot be decoded (image file is truncated"),
        (lambda: FILES["PNG of 16 bits"][0][:-40], "cannot be decoded (Invalid PNG data"),
        (lambda: photos.encoded(COLOURS)[:-40], "cannot be decoded (jpeg::Uncompress failed"),
        (bits_of_32, "has pixels of 32 bits, whose range is unknown: store 8 or 16 bits"),
        (lambda: saved(Image.new("1", (13_000, 13_000)), "PNG"), "has more pixels than the lim"),
        (lambda: saved(Image.new("1", (13_000, 13_000)), "GIF"), "has more pixels than the lim"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(data, why):
    assert decode.explain_failure(data()).startswith(why)
