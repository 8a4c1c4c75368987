"""The study's record: numbered files of Optuna's journal, in a folder or a bucket.

A file is created atomically, and only if its number is free. Of several writers one succeeds, and
the others try the next number. So no lock is needed, and any number of machines can share a study.
"""

import json
import os
import re
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from tftpu.errors import UserError
from tftpu.storage import buckets, files
from tftpu.storage.side_files import check_seal, seal

_DIGITS = 8


class Journal(BaseJournalBackend):
    """Optuna's journal in a folder.

    Args:
        folder: the folder, local or `gs://`.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._logs: list[dict[str, Any]] = []
        self._files = 0  # number of files that were read
        self._lock = threading.Lock()

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Returns all entries from a given number on."""
        with self._lock:
            self._read_new()
            return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends either all entries or none."""
        data = seal("\n".join(map(json.dumps, logs)))
        with self._lock:
            self._read_new()
            while not _create_file(self._resolve_path(self._files), data):
                self._read_new()

    def _read_new(self) -> None:
        # A file is created after all earlier ones, so none below the highest may be missing.
        listed = 0 if self._files else _find_highest(self._folder) + 1
        while (data := _read_content(self._resolve_path(self._files))) is not None:
            try:
                self._logs += _parse_entries(data)
            except ValueError as error:
                raise UserError(
                    f"{self._resolve_path(self._files)} of the search's record is damaged "
                    f"({error}): restore it, or start a new search in another workdir."
                ) from error
            self._files += 1
        if self._files < listed:
            raise UserError(
                f"{self._resolve_path(self._files)} of the search's record is missing: restore "
                "it, or start a new search in another workdir."
            )

    def _resolve_path(self, number: int) -> str:
        return files.join(self._folder, f"{number:0{_DIGITS}}.jsonl")


def _find_highest(folder: str) -> int:
    """Returns the highest number of a file in a folder; -1 if there is none."""
    names = files.list_names(folder)
    found = (re.fullmatch(rf"([0-9]{{{_DIGITS}}})\.jsonl", name) for name in names)
    return max((int(name[1]) for name in found if name), default=-1)


def _parse_entries(data: bytes) -> list[dict[str, Any]]:
    """Returns the entries of a file; raises ValueError if the file is damaged."""
    if not check_seal(data):
        raise ValueError(
            "it has no checksum: an earlier version of tftpu wrote it, or it was cut off"
        )
    entries = [json.loads(line) for line in data.splitlines()]
    del entries[-1]["crc32c"]
    return entries


def _read_content(path: str) -> bytes | None:
    """Returns the content of a file; None if it does not exist."""
    try:
        return files.read(path)
    except FileNotFoundError:
        return None


def _create_file(path: str, data: bytes) -> bool:
    """Creates a file atomically; returns False if it exists already."""
    if files.is_remote(path):
        try:
            buckets.publish(path, data, 0)
        except buckets.ChangedError:
            return False
        return True
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    # Not named after the pid, which processes on two machines may share.
    temporary = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        temporary.write_bytes(data)
        files.sync(temporary)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True
