"""The files of one checkpoint and their manifest, which makes them valid.

    checkpoints/<step>/<name>           the files
                       manifest.json    their sizes and checksums; written last

A folder without a manifest is not a checkpoint. This makes a save atomic on disks and in buckets
alike.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping

import google_crc32c

from tftpu.storage import buckets, files, side_files
from tftpu.storage.own_files import OwnFile

FILE = "manifest.json"


def write(folder: str, step: int, contents: Mapping[str, Iterable[bytes]], marker: OwnFile) -> None:
    """Writes the files of a checkpoint, and then their manifest.

    Args:
        folder: the checkpoint's own.
        step: its step.
        contents: pieces of each file, by name; read again if a bucket requires a retry.
        marker: the manifest's file.

    Raises:
        ChangedError: another process wrote the manifest meanwhile; that one is valid.
        OSError: it could not be written. Without a manifest, it is not valid.
    """
    marker.remove()  # left over from an interrupted save, or damaged
    files.remove_tree(folder)
    manifest: dict[str, dict[str, int]] = {}
    for name, pieces in contents.items():
        summed = _Summed(pieces)
        files.write_whole(files.join(folder, name), summed)
        manifest[name] = {"bytes": summed.size, "crc32c": summed.crc32c}
    record = json.dumps({"step": step, "files": manifest})
    marker.write(record.encode())


def read(folder: str) -> dict[str, bytes]:
    """Reads the files of a checkpoint.

    Raises:
        OSError, ValueError: a file is missing or damaged.
    """
    contents = {}
    for name, crc32c in _listed(_marker(files.join(folder, FILE))).items():
        data = files.read(files.join(folder, name))
        if google_crc32c.value(data) != crc32c:
            raise ValueError(f"{name} does not match its checksum")
        contents[name] = data
    return contents


def _marker(path: str) -> bytes:
    # Not by TensorFlow, which may still know the size of an earlier one.
    return side_files.content(path) if buckets.is_address(path) else files.read(path)


def _listed(manifest: bytes) -> dict[str, int]:
    """Returns the checksums of the files of a manifest; raises ValueError if it is damaged."""
    try:
        record = json.loads(manifest.decode())
    except RecursionError:
        raise ValueError(f"{FILE} is nested too deeply") from None
    listed = record.get("files") if isinstance(record, dict) else None
    if not isinstance(listed, dict):
        raise ValueError(f"{FILE} lists no files")
    for name, expected in listed.items():
        if not isinstance(expected, dict) or not isinstance(expected.get("crc32c"), int):
            raise ValueError(f"{FILE} has no checksum of {name!r}")
        if not re.fullmatch(r"\w[\w.-]*", name):  # of this folder, and of no other
            raise ValueError(f"{FILE} lists {name!r}, which is not a file of a checkpoint")
    if "state.json" not in listed:
        raise ValueError(f"{FILE} does not list state.json")
    return {name: expected["crc32c"] for name, expected in listed.items()}


def discard(folder: str) -> None:
    """Removes a checkpoint. Its manifest is removed first, which makes it invalid."""
    files.remove(files.join(folder, FILE))
    files.remove_tree(folder)


def folders(checkpoints: str) -> list[int]:
    """Returns the steps of all checkpoint folders in order, complete or not."""
    return sorted(int(name) for name in files.names_in(checkpoints) if name.isdigit())


def steps(checkpoints: str) -> list[int]:
    """Returns the steps of the complete checkpoints in order."""
    return [
        step
        for step in folders(checkpoints)
        if files.exists(files.join(checkpoints, str(step), FILE))
    ]


class _Summed:
    """An iterable of bytes that computes its size and checksum as it is consumed."""

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces = pieces
        self.size = self.crc32c = 0

    def __iter__(self) -> Iterator[bytes]:
        self.size = self.crc32c = 0
        for piece in self._pieces:
            self.size += len(piece)
            self.crc32c = google_crc32c.extend(self.crc32c, piece)
            yield piece
