"""The study's record: numbered files of Optuna's journal, in a folder or a bucket.

A file is created whole, and only where none of its number is: of several writers one succeeds, and
the others take the next number. So no lock is needed, and any number of machines share a study.
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
        folder: local or `gs://`.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._logs: list[dict[str, Any]] = []
        self._files = 0  # that were read
        self._lock = threading.Lock()

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Returns all entries from a number on."""
        with self._lock:
            self._read_new()
            return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends entries, all of them or none."""
        data = seal("\n".join(map(json.dumps, logs)))
        with self._lock:
            self._read_new()
            while not _create_file(self._resolve_path(self._files), data):
                self._read_new()

    def _read_new(self) -> None:
        # A file is created after those before it: all that are listed now can be read.
        listed = 0 if self._files else _find_highest(self._folder) + 1
        while (data := _read_content(self._resolve_path(self._files))) is not None:
            try:
                self._logs += _parse_entries(data)
            except ValueError as error:
                raise UserError(
                    f"{self._resolve_path(self._files)} of the search's record is damaged "
                    f"({error}): "
                    "restore it, or begin anew in another workdir."
                ) from error
            self._files += 1
        if self._files < listed:
            raise UserError(
                f"{self._resolve_path(self._files)} of the search's record is missing: restore "
                "it, or "
                "begin anew in another workdir."
            )

    def _resolve_path(self, number: int) -> str:
        return files.join(self._folder, f"{number:0{_DIGITS}}.jsonl")


def _find_highest(folder: str) -> int:
    """Returns the highest number of a file in a folder; -1 if there is none."""
    names = files.list_names(folder)
    found = (re.fullmatch(rf"([0-9]{{{_DIGITS}}})\.jsonl", name) for name in names)
    return max((int(name[1]) for name in found if name), default=-1)


def _parse_entries(data: bytes) -> list[dict[str, Any]]:
    """Returns the entries of a file; raises ValueError if it is damaged."""
    if not check_seal(data):
        raise ValueError("without a checksum: of an earlier version of tftpu, or cut off")
    entries = [json.loads(line) for line in data.splitlines()]
    del entries[-1]["crc32c"]
    return entries


def _read_content(path: str) -> bytes | None:
    """Returns what a file holds; None if there is none."""
    try:
        return files.read(path)
    except FileNotFoundError:
        return None


def _create_file(path: str, data: bytes) -> bool:
    """Creates a file, whole; returns False if there is one."""
    if files.is_remote(path):
        try:
            buckets.publish(path, data, 0)
        except buckets.ChangedError:
            return False
        return True
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{uuid.uuid4().hex}.tmp"  # machines may have the same pids
    try:
        temporary.write_bytes(data)
        files.sync(temporary)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True
