"""Requests for predictions in JSON, by rows or by columns.

Vertex AI has only rows, TensorFlow Serving has both:
https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements and
https://www.tensorflow.org/tfx/serving/api_rest.
"""

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tftpu.errors import find_nearest
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server.answers import SHOWN, BadRequest
from tftpu.inference.server.arrays import describe_kind, is_image_file, parse_array
from tftpu.inference.server.served import Arrays

SENTENCE = "sentence"  # the field of a text, as in `tftpu predict --input=sentence:TEXT`
_SIGNATURE = "serving_default"
_KNOWN = ("instances", "inputs", "signature_name", "parameters")
# Most characters of a text: the only thread that encodes texts takes about 50 us for each.
_LONGEST_TEXT = 20_000
# A body may have one value for each 4 bytes of the body limit, and one list for each 16, because as
# Python objects they take 10 to 100 times as many bytes.
_PER_VALUE, _PER_LIST = 4, 16


@dataclasses.dataclass(frozen=True)
class Request:
    """Examples to predict.

    Attributes:
        arrays: the arrays by the names of the model's inputs, (count, ...).
        count: the number of examples.
        rows: whether the answer is a list of examples, rather than an array for each output.
        texts: the examples, if they are texts that are not encoded as arrays yet.
    """

    arrays: Arrays
    count: int
    rows: bool
    texts: tuple[str, ...] = ()


def parse_body(body: bytes | bytearray, largest: int) -> dict[str, Any]:
    """Returns the JSON object in a body.

    Args:
        body: the JSON text.
        largest: the most bytes that a body may have, which also limits the number of its objects.

    Raises:
        BadRequest: the body is not a JSON object, or has too many values.
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
        given: the JSON object in its body.
        inputs: the inputs of the model.
        most_texts: the most texts in a request; 0: the model takes none.

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
        raise BadRequest("Some examples are texts and some are not: send only one kind.")
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
    said = f"There is no field {name[:SHOWN]!r} beside {', '.join(_KNOWN)}"
    near = find_nearest(name, [*_KNOWN, *(i.name for i in inputs)])
    if near in _KNOWN:
        return BadRequest(f"{said}. Did you mean {near!r}?")
    columns = ", ".join(f'"{i.name}": [...]' for i in inputs)
    if near is not None:
        said += f": {near!r} is an input of the model, which belongs in inputs"
    return BadRequest(f'{said}. Send {{"instances": [...]}} or {{"inputs": {{{columns}}}}}.')


def check_signature(given: Mapping[str, Any]) -> None:
    """Raises `BadRequest` for an unknown signature."""
    if given.get("signature_name", _SIGNATURE) not in (_SIGNATURE, "", None):
        raise BadRequest(f"The only signature_name is {_SIGNATURE!r}.")


def _parse_rows(instances: Any, inputs: Sequence[Input], others: str) -> Request:
    if not isinstance(instances, list) or not instances:
        raise BadRequest("instances must be a list of at least one example.")
    names = {i.name for i in inputs}
    named = [isinstance(row, dict) and not is_image_file(row) for row in instances]
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
                    f"{SENTENCE!r} must be a text, not {describe_kind(wrong[SENTENCE])}."
                )
            has, takes = _format_names(wrong), _format_names(names)
            raise BadRequest(f"An instance has {has}; the model takes {takes}{others}.")
        columns = {i.name: [row[i.name] for row in instances] for i in inputs}
    elif len(inputs) == 1:
        columns = {inputs[0].name: instances}
    else:
        raise BadRequest(f"An instance must be an object with {_format_names(names)}{others}.")
    arrays = {i.name: parse_array(columns[i.name], i) for i in inputs}
    return Request(arrays, len(instances), rows=True)


def _parse_columns(columns: Any, inputs: Sequence[Input], others: str) -> Request:
    if is_image_file(columns):
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
    arrays = {i.name: parse_array(columns[i.name], i) for i in inputs}
    counts = {len(array) for array in arrays.values()}
    if len(counts) != 1:
        raise BadRequest(f"The inputs hold different numbers of examples: {sorted(counts)}.")
    return Request(arrays, counts.pop(), rows=False)


def _format_names(names: Any) -> str:
    return ", ".join(repr(str(name)[:40]) for name in sorted(names)[:8]) or "no names"
