"""Notes in a staging folder: JSON with its own checksum, so that a damaged one counts as none."""

import json
from pathlib import Path
from typing import Any

import google_crc32c

from tftpu.storage import files


def write(path: Path, value: Any) -> None:
    """Writes a JSON value atomically."""
    text = json.dumps(value)
    files.write_whole(path, f"{_compute_checksum(text)} {text}".encode())


def read(path: Path) -> Any:
    """Returns the value of a note; None if there is none, or not the one that was written."""
    try:
        found, _, text = files.read(path).decode().partition(" ")
    except (OSError, ValueError):
        return None
    return json.loads(text) if found == _compute_checksum(text) else None


def _compute_checksum(text: str) -> str:
    return f"{google_crc32c.value(text.encode()):08x}"
