"""JSON files of a workdir that a run can do without, such as the mark of its best checkpoint.

A damaged file never makes a run fail: it is ignored with a warning. The run that writes the file
first renames the damaged one, for example to `best.damaged`.
"""

import contextlib
import json
import logging
import math
import os
import re
from typing import Any

import google_crc32c

from tftpu.storage import files

_log = logging.getLogger(__name__)
_SEAL = re.compile(rb', "crc32c": "([0-9a-f]{8})"\}\Z')

DAMAGED = ".damaged"  # suffix that is added to the name of a damaged file


def read(path: files.StrPath, **fields: type) -> dict[str, Any] | None:
    """Returns a file's JSON object; None if the file is missing or, with a warning, not readable.

    Args:
        path: the path of the file, local or remote.
        fields: types of the fields that the object must have, by name; a float is finite, and may
            be written as an integer.
    """
    try:
        return _read(path, fields)
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s cannot be read and is ignored: %s.", path, _explain_reason(error))
        return None


def take(path: files.StrPath, **fields: type) -> dict[str, Any] | None:
    """Returns what `read` returns, and renames a damaged file; for the writer of the file."""
    try:
        return _read(path, fields)
    except OSError as error:  # a disk or bucket that fails does not mean damaged content
        _log.warning("%s cannot be read and is ignored: %s.", path, error)
    except (ValueError, RecursionError) as error:
        set_aside(path, _explain_reason(error))
    return None


def take_text(path: files.StrPath) -> str | None:
    """Returns a file's line of ASCII text; None if it is missing, or damaged and so renamed."""
    if not is_there(path):
        return None
    try:
        text = read_content(path).decode("ascii").strip()
        if not text.isprintable() or not text:
            raise ValueError("it is not a line of text")
        return text
    except ValueError as error:
        set_aside(path, _explain_reason(error))
        return None


def set_aside(path: files.StrPath, reason: str) -> None:
    """Renames a damaged file, with a warning that gives the reason."""
    aside = f"{path}{DAMAGED}"
    try:
        files.rename(path, aside)
    except OSError as error:
        _log.warning(
            "%s is damaged and is ignored: %s. It could not be renamed (%s).", path, reason, error
        )
    else:
        _log.warning("%s is damaged and is ignored: %s. It is now %s.", path, reason, aside)


def copy_aside(path: files.StrPath, data: bytes) -> str:
    """Writes the content of a damaged file beside it; returns the path of the copy."""
    aside = f"{path}{DAMAGED}"
    with contextlib.suppress(OSError):  # on a full disk, the run continues without the copy
        files.write_whole(aside, data)
    return aside


def is_there(path: files.StrPath) -> bool:
    """Returns whether a path exists; a broken link counts as existing."""
    return files.exists(path) if files.is_remote(path) else os.path.lexists(path)


def _read(path: files.StrPath, fields: dict[str, type]) -> dict[str, Any] | None:
    """Returns what `read` returns, but raises OSError, ValueError or RecursionError on failure."""
    if not is_there(path):
        return None
    record = json.loads(read_content(path).decode())
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    for name, kind in fields.items():
        if name not in record:
            raise ValueError(f"it has no {name!r}")
        if not _is(record[name], kind):
            raise ValueError(f"its {name!r} is {str(record[name])[:40]!r}, not {kind.__name__}")
    return record


def read_content(path: files.StrPath) -> bytes:
    """Returns a file's content; raises OSError, or ValueError if it is not a regular file."""
    # Only regular files are read, because reading a pipe would wait forever.
    if not files.is_remote(path) and not os.path.isfile(path):
        raise ValueError("it is not a regular file")
    return files.read(path)


def seal(text: str) -> bytes:
    """Returns the text of a JSON object, or of lines of JSON objects, with the text's CRC32C.

    The checksum is added as the last field, "crc32c", of the last object.
    """
    return f'{text[:-1]}, "crc32c": "{google_crc32c.value(text.encode()):08x}"}}'.encode()


def check_seal(data: bytes) -> bool:
    """Returns whether data have a checksum from `seal`; raises ValueError if it does not match."""
    found = _SEAL.search(data)
    if found and int(found[1], 16) != google_crc32c.value(data[: found.start()] + b"}"):
        raise ValueError("it does not match its checksum")
    return found is not None


def read_sealed(path: files.StrPath) -> dict[str, Any] | None:
    """Returns the object of a file from `seal`; None if it is missing, unsealed or damaged."""
    try:
        data = files.read(path)
        if not check_seal(data):
            return None
        return {name: item for name, item in json.loads(data).items() if name != "crc32c"}
    except (OSError, ValueError):
        return None


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool) and kind is not bool:
        return False
    if kind is float:
        return is_number(value) and math.isfinite(value)
    if kind is str:
        return is_text(value)
    return isinstance(value, kind)


def is_text(value: Any) -> bool:
    """Returns whether a JSON value is a string that can be printed on one line."""
    return isinstance(value, str) and value.isprintable()


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a number that a float can represent, finite or not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not isinstance(value, int) or abs(value) < 1e300


def _explain_reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
