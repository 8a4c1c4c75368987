"""Lines of text: UTF-8 and JSON, with errors that name the place."""

import json
from typing import Any

from tftpu.errors import UserError


def json_object(line: str, place: str) -> dict[str, Any]:
    """Parses a line that holds a JSON object.

    Raises:
        UserError: it does not; names the place.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is not a JSON object.")
    if "\\u" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{place} holds half of a character: {error}") from error
    return row


def utf8(data: bytes, place: str) -> str:
    """Decodes UTF-8.

    Raises:
        UserError: the bytes are not UTF-8; names the place.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8: {error}") from error
