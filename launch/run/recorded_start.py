"""The record of how a run was started: the command, its folder, and digests of the user's code.

Later commands read from it how the run resumes, the folder of its relative paths, and which code
has changed. A run keeps the fields of its config, but the user's classes and functions are imported
from their files whenever the run is opened.
"""

import ast
import dataclasses
import glob
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tftpu.config import Experiment
from tftpu.launch.preflight import known_reports
from tftpu.storage import files, side_files
from tftpu.storage.own_files import OwnFile

_NAME = "code.json"
_PATHS = ("data_dir", "train_text", "eval_text", "tokenizer", "preset", "init_from")


def write(workdir: str, flags: Sequence[str]) -> None:
    """Records the current folder, the flags, and digests of the user's imported modules.

    Args:
        workdir: the folder of the run.
        flags: the flags of `tftpu train`; empty if something else started the run.
    """
    paths = _list_loaded()
    digests = {path: digest for path in paths if (digest := _hash_code(path))}
    record = {"folder": os.getcwd(), "flags": list(flags), "files": digests}
    OwnFile(workdir, _NAME).write(json.dumps(record, indent=1).encode())


def read_command(workdir: str) -> str:
    """Returns the shell command that started a run; "" if none was recorded."""
    folder, flags = _read_start(workdir)
    if not flags:
        return ""
    config, *others = flags
    line = shlex.join(["tftpu", "train", config.removeprefix("--config="), *others])
    return line if folder == os.getcwd() else f"cd {shlex.quote(folder)} && {line}"


def _read_start(workdir: str) -> tuple[str, list[str]]:
    """Returns the folder and the flags that started a run; "" and [] if they were not recorded."""
    recorded = side_files.read(files.join(workdir, _NAME)) or {}
    folder, flags = recorded.get("folder"), recorded.get("flags")
    has_flags = isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)
    return (folder if isinstance(folder, str) else ""), (flags or [] if has_flags else [])


def describe_changes(workdir: str) -> str:
    """Returns which imported files of the user changed since training last started; "" if none."""
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


def warn_of_folder(workdir: str, experiment: Experiment) -> None:
    """Prints which files of a config exist only relative to the folder where its run started."""
    folder, _ = _read_start(workdir)
    lost = [
        f"{place}={path}"
        for place, path in _list_paths(experiment)
        if folder and not os.path.isabs(path) and not glob.glob(path)
        if glob.glob(os.path.join(glob.escape(folder), path))
    ]
    if lost:
        are = "is" if len(lost) == 1 else "are"
        print(
            f"tftpu: warning: {', '.join(lost)} {are} relative to {folder}, where the run was "
            f"started: run `cd {shlex.quote(folder)}` first.",
            file=sys.stderr,
            flush=True,
        )


def _list_paths(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yields a config's paths with their fields, such as ("data.train_text", "a.txt")."""
    for group in ("model", "data"):
        part = getattr(experiment, group)
        for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            value = getattr(part, field.name)
            for text in value.split(",") if isinstance(value, str) else ():
                # In other fields, a text such as a split may only look like the name of a folder.
                if text and (field.name in _PATHS or set("./*") & set(text)):
                    yield f"{group}.{field.name}", text


def _list_loaded() -> list[str]:
    return [path for path in known_reports.list_own_code() if path.endswith(".py")]


def _hash_code(path: str) -> str:
    """Returns the digest of a file's code, or "" if it cannot be read.

    The digest ignores comments, and `get_config`, whose result the run has recorded.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    tree.body = [part for part in tree.body if getattr(part, "name", "") != "get_config"]
    return hashlib.sha256(ast.unparse(tree).encode(errors="replace")).hexdigest()
