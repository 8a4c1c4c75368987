"""The sizes and checksums ("sums") of a prediction's shards, which reveal damaged shards.

    .sums-1-of-2.crc    the sums of one machine, a line for each shard that it writes
    manifest.json       the sums of all machines, once all shards exist

Each line and each sealed JSON file has its own checksum. A damaged one is ignored.
"""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import google_crc32c

from tftpu.storage import buckets, files, lines, side_files
from tftpu.storage.own_files import OwnFile

_BEGIN = ".sums-"
_SEAL = "crc32c"


class Sum(NamedTuple):
    """The size and the CRC32C of a file, the latter in 8 hexadecimal digits."""

    bytes: int
    crc32c: str


def sum_of(data: bytes) -> Sum:
    """Returns the size and the checksum of a file's content."""
    return Sum(len(data), f"{google_crc32c.value(data):08x}")


def read_stored_sums(folder: str, names: Iterable[str]) -> dict[str, Sum]:
    """Returns the sums of the files that exist, by name; for a bucket, the service reports them."""
    if files.is_remote(folder):
        there = buckets.list_files(folder)
        return {name: Sum(*there[name][:2]) for name in names if name in there}
    found = {}
    for name in names:
        try:
            found[name] = Sum(*buckets.describe_file(files.join(folder, name))[:2])
        except OSError:  # the file is missing, or the disk cannot read it
            continue
    return found


def seal(record: Mapping[str, Any]) -> bytes:
    """Returns a record as the content of a JSON file that ends in a checksum of the rest."""
    return json.dumps({**record, _SEAL: _compute_checksum(record)}, indent=1).encode()


def is_sealed(record: Mapping[str, Any], data: bytes) -> bool:
    """Returns whether a file is byte for byte the result of `seal`."""
    return seal({name: value for name, value in record.items() if name != _SEAL}) == data


def remove_sums(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest without sizes and checksums, as earlier versions of tftpu wrote it."""
    plain = {name: value for name, value in manifest.items() if name != _SEAL}
    names = ("name", "first", "records")
    return {**plain, "shards": [{n: shard[n] for n in names} for shard in plain["shards"]]}


class Sums:
    """Reads the sums that all machines wrote for a folder's shards, and writes this machine's.

    Args:
        folder: the folder of the shards.
        plan: the plan of the predictions; sums for other plans are ignored.
        manifest: the sums in a manifest of that plan, by the shards' file names.
        machine: the number of this machine, from 1, and the number of all machines.

    Attributes:
        name: the name of this machine's file.
        known: the known sums of shards, by file name.
        begun: whether any machine has written sums to this folder; earlier versions of tftpu wrote
            none.
        of_plan: whether any machine has written sums for this plan.
    """

    def __init__(
        self,
        folder: str,
        plan: Mapping[str, Any],
        manifest: Mapping[str, Sum],
        machine: tuple[int, int],
    ):
        self._folder, self._plan = folder, _compute_checksum(plan)
        self.name = f"{_BEGIN}{machine[0]}-of-{machine[1]}.crc"
        self._lines: lines.Lines | None = None
        self._flushed = 0.0
        self.begun = self.of_plan = bool(manifest)
        self.known = dict(manifest)
        self.read()

    def read(self) -> None:
        """Reads the sums that all machines have written so far."""
        for name in files.list_names(self._folder):
            if name.startswith(_BEGIN) and name.endswith(".crc"):
                self.begun = True
                self.known.update(self._read(name))

    def start(self, shards: Iterable[str]) -> None:
        """Opens this machine's file, after rewriting it if it differs from the known sums."""
        own = OwnFile(self._folder, self.name)
        entries = {"": Sum(0, ""), **{s: self.known[s] for s in shards if s in self.known}}
        data = b"".join(self._format_line(*entry) for entry in entries.items())
        if _read_content(own.path) != data:
            own.write(data)
        self._lines = lines.Lines(own.path)

    def add(self, name: str, found: Sum) -> None:
        """Records a written shard; flushes seldom, as a bucket allows one change per second."""
        assert self._lines is not None
        self.known[name] = found
        self._lines.append(self._format_line(name, found).decode())
        if time.monotonic() - self._flushed >= lines.SECONDS:
            self._lines.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes the sums that are not written yet."""
        if self._lines is not None:
            self._lines.close()

    def _format_line(self, name: str, found: Sum) -> bytes:
        record = [self._plan, name, *found]
        return f"{_compute_checksum(record)} {json.dumps(record)}\n".encode()

    def _read(self, name: str) -> dict[str, Sum]:
        """Returns the undamaged sums of a machine for this plan."""
        found = {}
        for line in (_read_content(files.join(self._folder, name)) or b"").split(b"\n"):
            try:
                record = json.loads(line.partition(b" ")[2])
                plan, shard, size, crc32c = record
            except (ValueError, TypeError, RecursionError):
                continue
            entry = Sum(size, crc32c)
            if plan == self._plan and self._format_line(shard, entry) == line + b"\n":
                found[shard] = entry
        self.of_plan |= bool(found)
        return {shard: entry for shard, entry in found.items() if shard}


def read_manifest(path: str) -> tuple[dict[str, Any] | None, dict[str, Sum]]:
    """Returns a manifest, and the sums of its shards by file name.

    The manifest is None if it is missing or damaged. There are no sums if it was written without
    them.
    """
    try:
        data = files.read(path)
        record = json.loads(data)
        if not isinstance(record["shards"], list):
            return None, {}
        if _SEAL not in record and not any("bytes" in shard for shard in record["shards"]):
            return record, {}
        sums = {shard["name"]: Sum(shard["bytes"], shard["crc32c"]) for shard in record["shards"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, {}
    return (record, sums) if is_sealed(record, data) else (None, {})


def _read_content(path: str) -> bytes | None:
    """Returns the content of a file of sums; None if it is missing or cannot be read."""
    try:
        return side_files.read_content(path) if side_files.is_there(path) else None
    except (OSError, ValueError):
        return None


def _compute_checksum(value: Any) -> str:
    return f"{google_crc32c.value(json.dumps(value).encode()):08x}"
