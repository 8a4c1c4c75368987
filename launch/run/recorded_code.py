"""Digests of the code that is a run's own, by which later commands see what has changed since.

A run keeps the fields of its config, but its classes and functions are read from their files, each
time that the run is opened.
"""

import ast
import hashlib
import json
import os
from pathlib import Path

from tftpu.launch.preflight import known_reports
from tftpu.storage import files, side_files
from tftpu.storage.own_files import OwnFile

_NAME = "code.json"


def write(workdir: str) -> None:
    """Writes the digests of the loaded modules that are neither tftpu's nor installed."""
    paths = _list_loaded()
    digests = {path: digest for path in paths if (digest := _hash_code(path))}
    if digests:
        OwnFile(workdir, _NAME).write(json.dumps({"files": digests}, indent=1).encode())


def describe_changes(workdir: str) -> str:
    """Returns which loaded files are not as they were when the run was trained; "": none."""
    recorded = side_files.read(files.join(workdir, _NAME), files=dict) or {"files": {}}
    before = recorded["files"]
    common = [path for path in _list_loaded() if path in before]
    changed = [path for path in common if _hash_code(path) not in ("", before[path])]
    if not changed:
        return ""
    shown = ", ".join(os.path.relpath(path) for path in changed[:3])
    if len(changed) == 1:
        return f"{shown} has changed"
    return f"{shown}{f' and {len(changed) - 3} more' if changed[3:] else ''} have changed"


def _list_loaded() -> list[str]:
    return [path for path in known_reports.list_own_code() if path.endswith(".py")]


def _hash_code(path: str) -> str:
    """Returns the digest of a file's code, or "" if it cannot be read.

    Comments do not count, nor does `get_config`, whose fields the run keeps.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    tree.body = [part for part in tree.body if getattr(part, "name", "") != "get_config"]
    return hashlib.sha256(ast.unparse(tree).encode(errors="replace")).hexdigest()
