"""Decodes image files of any common format with Pillow.

TensorFlow decodes plain JPEGs and PNGs faster (`augment.decode`). This module decodes all other
images, and has the messages for files that are not images.
"""

import io
from typing import Any

import numpy as np

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"  # the first bytes of JPEG and PNG files
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
MAX_PIXELS = (1 << 30) // 4 // 3  # Pillow's limit, above which it suspects a decompression bomb
_TOO_LARGE = f"has more pixels than the limit of {MAX_PIXELS:,}: make it smaller"


class ImageError(ValueError):
    """The error for an unusable image. Its message continues a sentence after the file's name."""


def read_pixels(data: bytes, channels: int | None = None) -> np.ndarray:
    """Returns the upright pixels of an image, or of the first one if a file has several.

    Transparency is dropped. Of 16 bits, the upper 8 are kept, as in TensorFlow.

    Args:
        data: the content of the file.
        channels: 1 or 3; None: 1 if the image has only grey levels, else 3.

    Returns:
        (height, width, channels), uint8.

    Raises:
        ImageError: the image cannot be used; the message says why.
    """
    import PIL
    from PIL import Image, ImageOps

    if not data:
        raise ImageError("is empty")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(_TOO_LARGE)
            return _to_channels(ImageOps.exif_transpose(_to_eight_bits(image)), channels)
    except ImageError:
        raise
    except PIL.UnidentifiedImageError as error:
        raise ImageError(f"is not an image that can be read ({', '.join(_FORMATS)})") from error
    except Image.DecompressionBombError as error:
        raise ImageError(_TOO_LARGE) from error
    except Exception as error:  # Pillow raises errors of many kinds for damaged files
        raise ImageError(f"cannot be decoded ({error})") from error


def to_png(data: bytes) -> bytes:
    """Converts an image that `read_pixels` can read to a PNG with the same pixels."""
    from PIL import Image

    found, file = read_pixels(data), io.BytesIO()
    Image.fromarray(found[..., 0] if found.shape[-1] == 1 else found).save(file, "PNG")
    return file.getvalue()


def _to_eight_bits(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I;16"):
        upper = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        made = Image.fromarray(upper)
        made.getexif().update(image.getexif())
        return made
    if image.mode in ("I", "F"):
        raise ImageError("has pixels of 32 bits, whose range is unknown: store 8 or 16 bits")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # any other conversion of such an image makes Pillow warn
    return image


def _to_channels(image: Any, channels: int | None) -> np.ndarray:
    grey = image.mode in ("1", "L", "LA", "La") if channels is None else channels == 1
    found = np.asarray(image.convert("L" if grey else "RGB"))
    return found[..., None] if grey else found
