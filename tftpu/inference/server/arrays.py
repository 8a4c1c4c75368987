"""The arrays of a request's examples: nested lists of numbers, and image files in base64."""

import base64
import binascii
import io
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tftpu.amounts import format_size
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server.answers import SHOWN, BadRequest

_LOOKED_AT = 1000  # most examples that are searched for a mistake
_LONGEST_SIDE = 16_384  # pixels; messages show no larger number for the side of an image
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# Most bytes of all decoded images of a request: a small file may hold millions of pixels.
_UNPACKED = 256 * 2**20


def parse_array(values: list[Any], given: Input) -> np.ndarray:
    """Returns examples as an array, or raises `BadRequest`; images may be files, `{"b64": ...}`."""
    if any(map(is_image_file, values)):
        array = _decode_images(values, given)
    else:
        array = _parse_numbers(values, given)
    wanted = np.dtype(given.dtype)
    if array.dtype.kind not in {"b": "b", "i": "iu", "u": "iu"}.get(wanted.kind, "iuf"):
        raise _explain_kind(values, given)
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        most = limits.max if given.below is None else given.below - 1
        if array.min() < limits.min or array.max() > most:
            raise BadRequest(f"{_takes(given)}, from {max(limits.min, 0)} to {most}.")
    with np.errstate(over="ignore"):
        found = array.astype(wanted)
    if wanted.kind == "f" and not np.isfinite(found).all():
        raise BadRequest(f"{_takes(given)}; a number given is too large for it.")
    return found


def _parse_numbers(values: list[Any], given: Input) -> np.ndarray:
    """Returns nested lists of numbers as an array.

    NumPy gets only numbers, because it would turn texts into an array whose elements all have the
    longest text's size.
    """
    flat = values
    for size in given.shape:
        if not all(isinstance(part, list) and len(part) == size for part in flat):
            raise _explain_shape(values, given)
        flat = list(itertools.chain.from_iterable(flat))
    kinds = set(map(type, flat))
    if list in kinds:
        raise _explain_shape(values, given)
    if not kinds <= {int, float, bool}:
        raise _explain_kind(values, given)
    return np.array(flat).reshape((len(values), *given.shape))


def _explain_kind(values: list[Any], given: Input) -> BadRequest:
    """Returns the error for values of another kind than the model takes."""
    found = _find_some(values)
    if isinstance(found, str) and is_number(found):
        return BadRequest(f'{_takes(given)}, but "{found}" is a text: write it without quotes.')
    if isinstance(found, float):
        return BadRequest(_explain_floats(found, given))
    shown = repr(found[:SHOWN]) if isinstance(found, str) else describe_kind(found)
    return BadRequest(f"{_takes(given)}; given was something else, such as {shown}.")


def _explain_floats(found: float, given: Input) -> str:
    """Returns the message about floats, such as 0.0, where the model takes whole numbers."""
    if given.dtype == "bool":
        return f"{_takes(given)}, but numbers are floats, such as {found}: send true or false."
    whole = "whole numbers"
    if given.below is not None or given.dtype == "uint8":
        whole += f" 0 to {(given.below or 256) - 1}"
    scaled = ""
    if given.dtype == "uint8":
        scaled = (
            " (first scaled to this range: times 255 if white is 1, times 255 / 16 if it is 16)"
        )
    return (
        f"{_takes(given)}, but numbers are floats, such as {found}: send {whole}, in Python "
        f"array.astype({given.dtype!r}).tolist(){scaled}."
    )


def is_number(text: str) -> bool:
    """Returns whether a text would be a number without its quotes."""
    try:
        return len(text) < SHOWN and math.isfinite(float(text))
    except ValueError:
        return False


def _explain_shape(values: list[Any], given: Input) -> BadRequest:
    """Returns the error for examples of another shape than the model takes."""
    found = [_infer_shape(value) for value in values[:_LOOKED_AT]]
    shapes = set(found)
    text = next((value for value in values[:_LOOKED_AT] if isinstance(value, str)), None)
    file = ' Send an image file as {"b64": "..."}.' if text and _is_of_images(given) else ""
    if given.shape in shapes and len(shapes) > 1:
        place = next(place for place, shape in enumerate(found) if shape != given.shape)
        other = found[place] and list(found[place])
        is_what = f"is {other or describe_kind(values[place])}"
        return BadRequest(f"{_takes(given)}; instance {place} {is_what}.{file}")
    if len(shapes) > 1 or given.shape in shapes:
        return BadRequest(f"{_takes(given)}; the examples given differ in shape.")
    [shape] = shapes
    if not shape and not isinstance(values[0], list):
        return BadRequest(f"{_takes(given)}; given was {describe_kind(values[0])}.{file}")
    hint = ""
    if (len(values), *shape) == given.shape:
        hint = " A list is missing around this one example: [[...]] instead of [...]."
    return BadRequest(f"{_takes(given)}; given was {list(shape)}.{hint}")


def describe_kind(value: Any) -> str:
    """Returns the kind of a JSON value, such as "a list"."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"a text, {value[:SHOWN]!r}"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else f"the number {value}"


def _infer_shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of nested lists, according to their first elements."""
    found = []
    while isinstance(value, list) and len(found) < 8:
        found.append(len(value))
        value = value[0] if value else None
    return tuple(found)


def _decode_images(values: list[Any], given: Input) -> np.ndarray:
    """Returns the pixels of examples, of which some or all are image files."""
    size = len(values) * math.prod(given.shape)
    if size > _UNPACKED:
        raise BadRequest(
            f"The images of this request have {format_size(size)} once unpacked: send fewer at "
            f"once, with at most {format_size(_UNPACKED)} in total."
        )
    parts = []
    for place, value in enumerate(values):
        try:
            parts.append(
                _decode_pixels(value, given)
                if is_image_file(value)
                else _parse_numbers([value], given)[0]
            )
        except BadRequest as error:
            if len(values) == 1:
                raise
            raise BadRequest(f"Instance {place}: {error}") from error
    return np.stack(parts)


def _is_of_images(given: Input) -> bool:
    return given.dtype == "uint8" and len(given.shape) == 3 and given.shape[-1] in (1, 3)


def is_image_file(value: Any) -> bool:
    """Returns whether a value of a request is a file in base64."""
    return isinstance(value, dict) and set(value) == {"b64"}


def _decode_pixels(value: Mapping[str, Any], given: Input) -> np.ndarray:
    """Returns the pixels of a base64-encoded image file."""
    from PIL import Image, ImageOps

    if not _is_of_images(given):
        raise BadRequest(f"{_takes(given)}, not an image.")
    try:
        file = base64.b64decode(value["b64"], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise BadRequest("b64 must be the base64 encoding of an image file.") from error
    height, width, channels = given.shape
    try:
        with Image.open(io.BytesIO(file), formats=_IMAGE_FORMATS) as image:
            _refuse_size(image.size, {(width, height), (height, width)}, given)
            upright = ImageOps.exif_transpose(image)  # turned upright, as in training
            _refuse_size(upright.size, {(width, height)}, given)
            pixels = _to_eight_bits(upright)
    except BadRequest:
        raise
    except Exception as error:  # Pillow's readers of damaged files raise errors of many kinds
        known = ", ".join(_IMAGE_FORMATS)
        raise BadRequest(f"b64 holds no image that can be read ({known}).") from error
    if channels == 1 and (pixels != pixels[..., :1]).any():
        raise BadRequest("The image has colours, but the model takes grey: convert it first.")
    return pixels[..., :channels]


def _refuse_size(size: tuple[int, int], allowed: set[tuple[int, int]], given: Input) -> None:
    if size not in allowed:
        said = "x".join(str(min(side, _LONGEST_SIDE)) for side in size)
        height, width, _ = given.shape
        raise BadRequest(
            f"The image has {said} pixels, but the model takes {width}x{height}: crop and resize "
            "it first, as in docs/guides/exporting.md#pictures-of-any-size."
        )


def _to_eight_bits(image: Any) -> np.ndarray:
    """Returns 8-bit pixels; of 16 bits, the upper 8 are kept, as TensorFlow decodes them."""
    if not image.mode.startswith("I"):
        return np.asarray(image.convert("RGB"))
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[..., None], 3, -1)


def _takes(given: Input) -> str:
    return f"The input {given.name!r} takes {given.dtype} {list(given.shape)} for each example"


def _find_some(values: Any) -> Any:
    """Returns an example value from nested lists, for an error message.

    It is the first value that is not a number; otherwise the first float, integer or boolean.
    """
    flat = [values]
    while any(isinstance(value, list) and value for value in flat):
        lists = (value if isinstance(value, list) and value else [value] for value in flat)
        flat = list(itertools.chain.from_iterable(lists))
    kinds = list(map(type, flat))
    other = next((kind for kind in kinds if kind not in (float, int, bool)), None)
    return flat[kinds.index(other or next(k for k in (float, int, bool) if k in kinds))]
