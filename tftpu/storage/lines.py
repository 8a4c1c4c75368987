"""Files of lines that a run appends to, such as `metrics.jsonl`, local or in a bucket.

Lines that cannot be written are kept in memory, up to a limit, and written once the disk or the
bucket takes them again. An object in a bucket cannot be appended to: new lines are uploaded as a
second object, and the service joins it to the first, so that each line is uploaded once.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import google_crc32c

from tftpu.errors import UserError
from tftpu.storage import buckets, files, side_files

_log = logging.getLogger(__name__)

LIMIT = 16 << 20  # most bytes of lines that are kept while they cannot be written
SECONDS = 1.0  # seconds between two changes of an object; a service allows one change a second


class Lines:
    """A file of lines, open for appending. Only one thread may use it at a time.

    Args:
        path: local or remote.
        resumed_at: the step from which the run resumes: lines of later steps, which the run writes
            again, and an incomplete last line are dropped. None keeps everything.

    Raises:
        OSError: the file cannot be read or changed.
        ChangedError: another process wrote the object in the bucket meanwhile.
    """

    def __init__(self, path: str, resumed_at: int | None = None):
        self._path = path
        self._pending = bytearray()
        self._lost = 0  # lines dropped beyond the limit since the last successful write
        self._failed = False
        self._place = _choose_place(path)
        if resumed_at is not None:
            self._place.change(lambda data: keep_up_to(path, data, resumed_at))

    def append(self, text: str) -> None:
        """Adds lines for the next `flush`; drops them if too many could not be written before."""
        data = text.encode(errors="backslashreplace")
        if self._failed and len(self._pending) + len(data) > LIMIT:
            self._lost += data.count(b"\n")
        else:
            self._pending += data

    def flush(self, durable: bool = False) -> None:
        """Writes the pending lines; on a failure, logs a warning and keeps them.

        Args:
            durable: whether the lines are to survive a crash of the machine, too.
        """
        try:
            if self._pending:
                self._place.append(self._pending)
            if durable:
                self._place.sync()
        except (OSError, UserError) as error:
            if not self._failed:
                _log.warning(
                    "%s cannot be written (%s). The run continues and keeps its lines, up to %d "
                    "MiB, until they can be written.",
                    self._path,
                    str(error).rstrip("."),
                    LIMIT >> 20,
                )
            self._failed = True
            return
        if self._failed:
            lost = f"{self._lost:,} lines beyond the limit are lost" if self._lost else ""
            _log.warning("%s is written again; %s.", self._path, lost or "nothing is lost")
        self._failed, self._lost = False, 0

    def roll_back(self, step: int) -> None:
        """Drops the lines of a JSON-lines file whose steps are after `step`."""
        self.flush()
        self._pending[:] = keep_up_to(self._path, bytes(self._pending), step)
        self._place.change(lambda data: keep_up_to(self._path, data, step))

    def close(self) -> None:
        """Writes the remaining lines; warns with the number of lines that cannot be written."""
        self.flush(durable=True)
        lost = self._pending.count(b"\n") + self._lost
        if lost:
            _log.warning("%s lacks the last %s lines of the run.", self._path, f"{lost:,}")


def read(path: str) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Yields the step, split and metrics of each line of a `metrics.jsonl`; skips damaged lines."""
    if not side_files.is_there(path):
        return
    try:
        data = side_files.read_content(path)
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read and is ignored: %s.", path, error)
        return
    for line in data.split(b"\n"):
        try:
            record = json.loads(line.decode())
            step, split = record.pop("step"), record.pop("split")
            if not isinstance(step, int) or not side_files.is_text(split):
                continue
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # the line is damaged, or is being written
        record.pop("time", None)
        numbers = {k: v for k, v in record.items() if side_files.is_number(v)}
        yield step, split, {k: float(v) for k, v in numbers.items() if side_files.is_text(k)}


def keep_up_to(path: str, data: bytes, step: int) -> bytes:
    """Returns the JSON lines up to and including a step, without an incomplete last line.

    Damaged lines are dropped as well, after the content is copied to another file.
    """
    kept, damaged = [], 0
    *whole, last = data.split(b"\n")
    for line in [*whole, last]:
        try:
            if line and json.loads(line.decode())["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            # The last line of a run that was killed may be incomplete.
            damaged += line is not last or not _is_line_start(line)
    if damaged:
        copy = side_files.copy_aside(path, data)
        _log.warning(
            "%s has %d damaged lines, which are dropped. A copy of the original file is %s.",
            path,
            damaged,
            copy,
        )
    return b"".join(kept)


def _is_line_start(data: bytes) -> bool:
    start = b'{"step": '
    return data[: len(start)] == start[: len(data)]


class _Place(Protocol):
    """The storage of a file of lines, a disk or a bucket."""

    def append(self, pending: bytearray) -> None:
        """Writes bytes at the end, and removes from `pending` what it wrote."""

    def change(self, edit: Callable[[bytes], bytes]) -> None:
        """Replaces the content, if there is any, by `edit(content)`."""

    def sync(self) -> None:
        """Makes the written bytes durable."""


class _Disk:
    """A file on a disk."""

    def __init__(self, path: str):
        self._path = path
        self._dirty = False
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

    def append(self, pending: bytearray) -> None:
        self._dirty = True
        files.append(self._path, pending)

    def change(self, edit: Callable[[bytes], bytes]) -> None:
        if not side_files.is_there(self._path):
            return
        try:
            data = side_files.read_content(self._path)
        except ValueError as error:
            side_files.set_aside(self._path, str(error))
            return
        edited = edit(data)
        if edited != data:
            files.write_whole(self._path, edited)

    def sync(self) -> None:
        if self._dirty:
            files.sync(self._path)
            self._dirty = False


class _Bucket:
    """An object of Cloud Storage, replaced only if no other process has replaced it."""

    def __init__(self, uri: str):
        self._uri = uri
        self._changed_at = -SECONDS
        # Bytes that were sent, but not confirmed; the next write sends them again first.
        self._unsure = b""
        data, generation = buckets.read_version(uri)
        self._known = buckets.Stored(len(data), f"{google_crc32c.value(data):08x}", generation)

    def append(self, pending: bytearray) -> None:
        while pending:
            time.sleep(max(0.0, self._changed_at + SECONDS - time.monotonic()))
            data = self._unsure = self._unsure or bytes(pending)
            self._known = buckets.append(self._uri, data, self._known)
            self._changed_at, self._unsure = time.monotonic(), b""
            del pending[: len(data)]

    def change(self, edit: Callable[[bytes], bytes]) -> None:
        data, generation = buckets.read_version(self._uri)
        edited = edit(data)
        if edited != data:
            generation = buckets.publish(self._uri, edited, generation)
        self._known = buckets.Stored(len(edited), f"{google_crc32c.value(edited):08x}", generation)

    def sync(self) -> None:
        pass  # an object is durable as soon as it is written


def _choose_place(path: str) -> _Place:
    return _Bucket(path) if files.is_remote(path) else _Disk(path)
