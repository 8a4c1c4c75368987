"""JSON files of a workdir that a run can do without, such as the mark of its best checkpoint."""

import json
import logging
from typing import Any

from tftpu.storage import files

_log = logging.getLogger(__name__)


def read(path: files.StrPath, *fields: str) -> dict[str, Any] | None:
    """Reads a JSON object; returns None if there is no file, and with a warning if it is damaged.

    Args:
        path: of the file, local or remote.
        fields: names that the object must have.
    """
    if not files.exists(path):
        return None
    try:
        record = json.loads(files.read(path))
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
        missing = [field for field in fields if field not in record]
        if missing:
            raise ValueError(f"it has no {missing[0]!r}")
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read and is ignored: %s.", path, error)
        return None
    return record
