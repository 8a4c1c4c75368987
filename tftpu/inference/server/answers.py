"""The answers to requests as JSON: predictions and errors."""

from typing import Any

import numpy as np
import orjson

from tftpu.inference.server.served import Arrays

# Paths of OpenAI's API; the first two are served, and only by models that write text.
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
OPENAI = COMPLETIONS, MODELS, "/v1/chat/completions", "/v1/embeddings"
SHOWN = 40  # most characters of a value, in messages


class BadRequest(Exception):  # noqa: N818 (an answer, not a failure of the server)
    """A request cannot be answered; the message says why."""


class UnknownModel(Exception):  # noqa: N818
    """A request names a model that is not served."""


def format_answer(found: Arrays, rows: bool) -> bytes:
    """Returns the body of an answer: "predictions" for rows, "outputs" for columns."""
    columns = {name: _to_plain(value) for name, value in found.items()}
    if not rows:
        only = next(iter(columns.values())) if len(columns) == 1 else columns
        return _encode_json({"outputs": only})
    if len(columns) == 1:
        [values] = columns.values()
        return _encode_json({"predictions": values})
    examples = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]
    return _encode_json({"predictions": examples})


def _to_plain(values: np.ndarray) -> Any:
    """Returns an array that JSON can hold, or nested lists of texts."""
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
    """Returns the body of an error, in the form of the API to which an address belongs.

    Args:
        message: the error message.
        status: the HTTP status of the answer; 500 for an error in the middle of a streamed text.
        path: the address; OpenAI's addresses get OpenAI's form, others TensorFlow Serving's.
    """
    if path not in OPENAI:
        return _encode_json({"error": message})
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    return _encode_json({"error": {"message": message, "type": kind, "param": None, "code": None}})
