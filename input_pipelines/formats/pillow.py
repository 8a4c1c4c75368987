"""Image files of any common format as pixels, by Pillow.

TensorFlow decodes plain JPEGs and PNGs faster (`augment.decode`): here are all others, and the
words for a file that is not an image.
"""

import io
import struct
from typing import Any

import numpy as np

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"  # what their files begin with
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
MAX_PIXELS = (1 << 30) // 4 // 3  # as Pillow's: beyond it suspects a decompression bomb
_TOO_LARGE = f"has more pixels than are decoded, {MAX_PIXELS:,}: reduce it"
_ORIENTATION = 0x0112  # the tag of EXIF


class ImageError(ValueError):
    """An image that cannot be used: the end of a sentence that begins with the file's name."""


def read_pixels(data: bytes, channels: int | None = None) -> np.ndarray:
    """Returns the upright pixels of an image, of the first one if there are several.

    Transparency is dropped. Of 16 bits the upper 8 are kept, as TensorFlow does.

    Args:
        data: of the file.
        channels: 1, 3, or None: 1 if the image has grey levels only.

    Returns:
        (height, width, channels), uint8.

    Raises:
        ImageError: it cannot be used; says why.
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
    except Exception as error:  # Pillow's readers of damaged files raise errors of many kinds
        raise ImageError(f"cannot be decoded ({error})") from error


def to_png(data: bytes) -> bytes:
    """Returns an image of any of the formats as a PNG, with the same pixels; see `pixels`."""
    from PIL import Image

    found, file = read_pixels(data), io.BytesIO()
    Image.fromarray(found[..., 0] if found.shape[-1] == 1 else found).save(file, "PNG")
    return file.getvalue()


def read_orientation(data: bytes) -> int:
    """Returns the orientation that the EXIF data of an image, or its XMP, state, from 1 to 8.

    Returns:
        1, upright, if there are none or they are damaged.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            found = image.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, ValueError, KeyError, TypeError, OSError, struct.error):
        return 1
    return found if found in range(1, 9) else 1


def _to_eight_bits(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I;16"):
        upper = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        made = Image.fromarray(upper)
        made.getexif().update(image.getexif())
        return made
    if image.mode in ("I", "F"):
        raise ImageError("has pixels of 32 bits, of which the range is not known: store 8 or 16")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # Pillow warns of any other way
    return image


def _to_channels(image: Any, channels: int | None) -> np.ndarray:
    grey = image.mode in ("1", "L", "LA", "La") if channels is None else channels == 1
    found = np.asarray(image.convert("L" if grey else "RGB"))
    return found[..., None] if grey else found
