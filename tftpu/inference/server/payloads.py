"""Predictions as JSON, in rows (Vertex AI, TensorFlow Serving) or columns (TensorFlow Serving).

https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements and
https://www.tensorflow.org/tfx/serving/api_rest.
"""

import base64
import binascii
import dataclasses
import gc
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from tftpu.amounts import format_size
from tftpu.errors import find_nearest
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server.served import Arrays

# OpenAI's addresses; only the first two are served, where the model writes text.
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
OPENAI = COMPLETIONS, MODELS, "/v1/chat/completions", "/v1/embeddings"
SENTENCE = "sentence"  # names a text, as the kind of an address does for `tftpu predict`
_SIGNATURE = "serving_default"
_KNOWN = ("instances", "inputs", "signature_name", "parameters")
_LOOKED_AT = 1000  # most examples in which a mistake is looked for
_SHOWN = 40  # most characters of a value, in messages
# Most characters of a text, which takes the only thread that reads texts about 50 us for each.
_LONGEST_TEXT = 20_000
_LONGEST_SIDE = 16_384  # most pixels along a side of an image, in messages
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# Bytes of the largest body for each value and each list. As Python objects, they take 10 to 100
# times as many.
_PER_VALUE, _PER_LIST = 4, 16
# Most bytes of the decoded images of a request: a small file may hold millions of pixels.
_UNPACKED = 256 * 2**20


class BadRequest(Exception):  # noqa: N818 (an answer, not a failure of the server)
    """A request cannot be answered; the message says why."""


class UnknownModel(Exception):  # noqa: N818
    """A request names a model that is not served."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Examples to predict.

    Attributes:
        arrays: the arrays by the names of the model's inputs, (count, ...).
        count: the number of examples.
        rows: whether the answer is a list of examples, rather than an array for each output.
        texts: the examples, if they are texts, which have no arrays yet.
    """

    arrays: Arrays
    count: int
    rows: bool
    texts: tuple[str, ...] = ()


def parse_body(body: bytes | bytearray, largest: int) -> dict[str, Any]:
    """Returns the object of a body.

    Args:
        body: the JSON text.
        largest: the most bytes that a body may have, which also limits the number of its objects.

    Raises:
        BadRequest: it is not a JSON object, or has too many values.
    """
    counts = {  # upper limits, because texts may contain these characters, too
        "values": (body.count(b","), largest // _PER_VALUE),
        "lists and objects": (body.count(b"[") + body.count(b"{"), largest // _PER_LIST),
    }
    for name, (count, most) in counts.items():
        if count > most:
            raise BadRequest(
                f"The body has {count:,} {name}, and may have {most:,}: send fewer examples at "
                "once, and images as files, or raise the server's --body_mib."
            )
    gc.disable()  # objects from JSON have no cycles, so collecting garbage meanwhile is a waste
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        quotes = ' JSON has double quotes, ".' if body.lstrip().startswith((b"{'", b"['")) else ""
        raise BadRequest(f"The body is not JSON: {error}.{quotes}") from error
    finally:
        gc.enable()
    if not isinstance(found, dict):
        raise BadRequest(
            'The body must be a JSON object: {"instances": [...]} for /predict, {"prompt": "..."} '
            "for /v1/completions."
        )
    return found


def parse_request(
    given: Mapping[str, Any], inputs: Sequence[Input], most_texts: int = 0
) -> Request:
    """Returns the arrays, or the texts, of a request.

    Args:
        given: the object of its body.
        inputs: the inputs of the model.
        most_texts: the most texts that it may have; 0: the model takes none.

    Raises:
        BadRequest: the request does not fit the model.
    """
    unknown = sorted(set(given) - set(_KNOWN))
    if unknown:
        raise _explain_field(unknown[0], inputs)
    check_signature(given)
    if given.get("parameters"):
        raise BadRequest("This model takes no parameters.")
    if ("instances" in given) == ("inputs" in given):
        raise BadRequest("Give either instances, a list of examples, or inputs.")
    rows = "instances" in given
    examples = given["instances"] if rows else given["inputs"]
    texts = _find_texts(examples, rows, most_texts) if most_texts else []
    if texts:
        return Request({}, len(texts), rows, tuple(texts))
    others = f", or {SENTENCE!r}, a text" if most_texts else ""
    parse = _parse_rows if rows else _parse_columns
    return parse(examples, inputs, others)


def _find_texts(examples: Any, rows: bool, most: int) -> list[str]:
    """Returns the texts of a request; [] if its examples are something else."""
    if not rows and isinstance(examples, dict) and set(examples) == {SENTENCE}:
        examples = examples[SENTENCE]
    if not isinstance(examples, list):
        return []
    named = [isinstance(row, dict) and set(row) == {SENTENCE} for row in examples]
    found = [row[SENTENCE] if has_name else row for row, has_name in zip(examples, named)]
    texts = [text for text in found if isinstance(text, str)]
    if not texts:
        return []
    if len(texts) < len(found):
        raise BadRequest("Some examples are texts and some are not: send all alike.")
    if len(texts) > most:
        raise BadRequest(
            f"There are {len(texts)} texts: give 1 to {most}, which the server's --batch_size=N "
            "raises."
        )
    for place, text in enumerate(texts):
        if not text:
            raise BadRequest(f"The text of instance {place} is empty: send one with words.")
        if len(text) > _LONGEST_TEXT:
            raise BadRequest(
                f"The text of instance {place} has {len(text):,} characters, and may have "
                f"{_LONGEST_TEXT:,}: send a part of it."
            )
    return texts


def _explain_field(name: str, inputs: Sequence[Input]) -> BadRequest:
    """Returns the error for a field of the request that is unknown."""
    said = f"There is no field {name[:_SHOWN]!r} beside {', '.join(_KNOWN)}"
    near = find_nearest(name, [*_KNOWN, *(i.name for i in inputs)])
    if near in _KNOWN:
        return BadRequest(f"{said}. Did you mean {near!r}?")
    columns = ", ".join(f'"{i.name}": [...]' for i in inputs)
    if near is not None:
        said += f": {near!r} is an input of the model, which belongs into inputs"
    return BadRequest(f'{said}. Send {{"instances": [...]}} or {{"inputs": {{{columns}}}}}.')


def check_signature(given: Mapping[str, Any]) -> None:
    """Raises `BadRequest` for an unknown signature."""
    if given.get("signature_name", _SIGNATURE) not in (_SIGNATURE, "", None):
        raise BadRequest(f"The only signature_name is {_SIGNATURE!r}.")


def _parse_rows(instances: Any, inputs: Sequence[Input], others: str) -> Request:
    if not isinstance(instances, list) or not instances:
        raise BadRequest("instances must be a list of at least one example.")
    names = {i.name for i in inputs}
    named = [isinstance(row, dict) and not _is_encoded(row) for row in instances]
    if any(named) and not all(named):
        first, other = named.index(True), named.index(False)
        raise BadRequest(
            f"Instance {first} has {_format_names(instances[first])}, and instance {other} has no "
            "names: write all alike."
        )
    if all(named):
        wrong = next((row for row in instances if set(row) != names), None)
        if wrong is not None:
            if others and set(wrong) == {SENTENCE}:
                raise BadRequest(
                    f"{SENTENCE!r} must be a text, not {_describe_kind(wrong[SENTENCE])}."
                )
            has, takes = _format_names(wrong), _format_names(names)
            raise BadRequest(f"An instance has {has}; the model takes {takes}{others}.")
        columns = {i.name: [row[i.name] for row in instances] for i in inputs}
    elif len(inputs) == 1:
        columns = {inputs[0].name: instances}
    else:
        raise BadRequest(f"An instance must be an object with {_format_names(names)}{others}.")
    arrays = {i.name: _parse_array(columns[i.name], i) for i in inputs}
    return Request(arrays, len(instances), rows=True)


def _parse_columns(columns: Any, inputs: Sequence[Input], others: str) -> Request:
    if _is_encoded(columns):
        raise BadRequest('inputs must be a list of examples: [{"b64": "..."}].')
    if len(inputs) == 1 and not isinstance(columns, dict):
        columns = {inputs[0].name: columns}
    names = {i.name for i in inputs}
    if not isinstance(columns, dict) or set(columns) != names:
        if others and isinstance(columns, dict) and set(columns) == {SENTENCE}:
            raise BadRequest(f"{SENTENCE!r} must be a list of texts.")
        has = _format_names(columns) if isinstance(columns, dict) else "no names"
        raise BadRequest(f"inputs has {has}; the model takes {_format_names(names)}{others}.")
    for name, values in columns.items():
        if not isinstance(values, list) or not values:
            raise BadRequest(f"The input {name!r} must be a list of at least one example.")
    arrays = {i.name: _parse_array(columns[i.name], i) for i in inputs}
    counts = {len(array) for array in arrays.values()}
    if len(counts) != 1:
        raise BadRequest(f"The inputs hold different numbers of examples: {sorted(counts)}.")
    return Request(arrays, counts.pop(), rows=False)


def _parse_array(values: list[Any], given: Input) -> np.ndarray:
    """Returns the examples of an input; images may be files, `{"b64": ...}`."""
    if any(map(_is_encoded, values)):
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
    return BadRequest(
        f"{_takes(given)}; given was something else, such as {str(found)[:_SHOWN]!r}."
    )


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
        return len(text) < _SHOWN and math.isfinite(float(text))
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
        is_what = f"is {other or _describe_kind(values[place])}"
        return BadRequest(f"{_takes(given)}; instance {place} {is_what}.{file}")
    if len(shapes) > 1 or given.shape in shapes:
        return BadRequest(f"{_takes(given)}; the examples given differ in shape.")
    [shape] = shapes
    if not shape and not isinstance(values[0], list):
        return BadRequest(f"{_takes(given)}; given was {_describe_kind(values[0])}.{file}")
    hint = ""
    if (len(values), *shape) == given.shape:
        hint = " A list is missing around this one example: [[...]] instead of [...]."
    return BadRequest(f"{_takes(given)}; given was {list(shape)}.{hint}")


def _describe_kind(value: Any) -> str:
    """Returns the kind of a JSON value, such as "a list"."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"a text, {value[:_SHOWN]!r}"
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
            f"once, of {format_size(_UNPACKED)} together."
        )
    parts = []
    for place, value in enumerate(values):
        try:
            parts.append(
                _decode_pixels(value, given)
                if _is_encoded(value)
                else _parse_numbers([value], given)[0]
            )
        except BadRequest as error:
            if len(values) == 1:
                raise
            raise BadRequest(f"Instance {place}: {error}") from error
    return np.stack(parts)


def _is_of_images(given: Input) -> bool:
    return given.dtype == "uint8" and len(given.shape) == 3 and given.shape[-1] in (1, 3)


def _is_encoded(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"b64"}


def _decode_pixels(value: Mapping[str, Any], given: Input) -> np.ndarray:
    """Returns the pixels of an image file in base64."""
    from PIL import Image, ImageOps

    if not _is_of_images(given):
        raise BadRequest(f"{_takes(given)}, no image.")
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
        raise BadRequest("The image has colours, and the model takes grey: convert it before.")
    return pixels[..., :channels]


def _refuse_size(size: tuple[int, int], allowed: set[tuple[int, int]], given: Input) -> None:
    if size not in allowed:
        said = "x".join(str(min(side, _LONGEST_SIDE)) for side in size)
        height, width, _ = given.shape
        raise BadRequest(
            f"The image has {said} pixels, and the model takes {width}x{height}: crop and resize "
            "it before, as in docs/guides/exporting.md#pictures-of-any-size."
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
    """Returns a value in nested lists, for a message about what was given.

    It is the first that is no number, else the first float, whole number or truth value.
    """
    flat = [values]
    while any(isinstance(value, list) and value for value in flat):
        lists = (value if isinstance(value, list) and value else [value] for value in flat)
        flat = list(itertools.chain.from_iterable(lists))
    kinds = list(map(type, flat))
    other = next((kind for kind in kinds if kind not in (float, int, bool)), None)
    return flat[kinds.index(other or next(k for k in (float, int, bool) if k in kinds))]


def _format_names(names: Any) -> str:
    return ", ".join(repr(str(name)[:40]) for name in sorted(names)[:8]) or "no names"


def answer(found: Arrays, asked: Request) -> bytes:
    """Returns the body of an answer: "predictions" for rows, "outputs" for columns."""
    columns = {name: _to_plain(value) for name, value in found.items()}
    if not asked.rows:
        only = next(iter(columns.values())) if len(columns) == 1 else columns
        return _encode_json({"outputs": only})
    if len(columns) == 1:
        [values] = columns.values()
        return _encode_json({"predictions": values})
    rows = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]
    return _encode_json({"predictions": rows})


def _to_plain(values: np.ndarray) -> Any:
    """Returns an array that JSON can hold; texts become a list."""
    if values.dtype.kind in "OSU":
        return _decode_texts(values.tolist())
    if values.dtype.kind == "f" and values.dtype.itemsize != 8:
        values = values.astype(np.float32)
    return np.ascontiguousarray(values)


def _decode_texts(values: Any) -> Any:
    """Returns nested lists of texts."""
    if isinstance(values, list):
        return [_decode_texts(value) for value in values]
    return values.decode(errors="replace") if isinstance(values, bytes) else values


def _encode_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def format_error(message: str, status: int, path: str) -> bytes:
    """Returns the body of an error, in the form that clients of an address read.

    Args:
        message: says what is wrong.
        status: the status of the answer; of an error in the middle of a text, 500.
        path: the address: OpenAI's have OpenAI's form, others TensorFlow Serving's.
    """
    if path not in OPENAI:
        return _encode_json({"error": message})
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    return _encode_json({"error": {"message": message, "type": kind, "param": None, "code": None}})
