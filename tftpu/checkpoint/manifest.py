"""The files of one checkpoint and their manifest, which makes them valid.

    checkpoints/<step>/<name>           the files
                       manifest.json    sizes and checksums of their blocks; written last

A folder without a manifest is not a checkpoint. This makes a save atomic on disks and in buckets
alike. A file is a sequence of blocks, each with its own checksum, so a reader can read and verify
single blocks.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import google_crc32c

from tftpu.errors import UserError
from tftpu.storage import files
from tftpu.storage.own_files import OwnFile
from tftpu.storage.pieces import cut_pieces
from tftpu.storage.side_files import check_seal, seal

FILE = "manifest.json"
_AT_ONCE = 64 << 20  # maximum number of bytes of neighbouring blocks that one read returns

# Returns the blocks of a file. It is called again if a bucket requires a retry.
Blocks = Callable[[], Iterable[bytes | memoryview]]


class Block(NamedTuple):
    """A block of a file: its size in bytes and its CRC32C."""

    size: int
    crc32c: int


Listing = dict[str, list[Block]]  # the blocks of each file, by the file's name


class StoredFile:
    """A file that a manifest lists.

    Args:
        path: the path of the file, local or remote.
        blocks: the blocks of the file, as the manifest lists them.

    Attributes:
        blocks: the blocks of the file.
    """

    def __init__(self, path: str, blocks: list[Block]):
        self._path = path
        self.blocks = blocks

    def read(self, wanted: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yields (number, bytes) of the wanted blocks, in the order of the file.

        Raises:
            OSError: the file is missing or cannot be read.
            ValueError: the file has another size, or a block does not match its checksum.
        """
        starts = [0, *itertools.accumulate(block.size for block in self.blocks)]
        size = files.find_size(self._path)
        if size != starts[-1]:
            raise ValueError(
                f"{self._path} must have {starts[-1]:,} bytes, but it has {size or 0:,}"
            )
        for run in self._group_neighbours(sorted(set(wanted))):
            first, last = starts[run[0]], starts[run[-1] + 1]
            data = files.read_range(self._path, first, last - first)
            for number in run:
                part = data[starts[number] - first : starts[number + 1] - first]
                if (len(part), google_crc32c.value(part)) != self.blocks[number]:
                    raise ValueError(f"{self._path} does not match its checksums")
                yield number, part

    def _group_neighbours(self, numbers: list[int]) -> Iterator[list[int]]:
        run: list[int] = []
        size = 0
        for number in numbers:
            following = run and number == run[-1] + 1
            if run and (not following or size + self.blocks[number].size > _AT_ONCE):
                yield run
                run, size = [], 0
            run.append(number)
            size += self.blocks[number].size
        if run:
            yield run


def remove_leftovers(folder: str, marker: OwnFile) -> None:
    """Removes the files of an interrupted save, or of a damaged checkpoint.

    Args:
        folder: the checkpoint's folder.
        marker: the manifest's file.

    Raises:
        ChangedError: another process wrote the manifest meanwhile; its checkpoint is valid.
        OSError: a file could not be removed.
    """
    marker.remove()
    files.remove_tree(folder)


def write_files(folder: str, contents: Mapping[str, Blocks]) -> Listing:
    """Writes files of a checkpoint; returns their blocks by name.

    Args:
        folder: the checkpoint's folder.
        contents: the blocks of each file, by name.

    Raises:
        OSError: a file could not be written.
    """
    listed: Listing = {}
    for name, blocks in contents.items():
        summed = _Summed(blocks)
        files.write_whole(files.join(folder, name), summed)
        listed[name] = summed.found
    return listed


def commit(step: int, listed: Listing, marker: OwnFile) -> None:
    """Makes a checkpoint valid: writes its manifest, once all its other files are written.

    Args:
        step: the step of the checkpoint.
        listed: the blocks of all its files, by name.
        marker: the manifest's file.

    Raises:
        ChangedError: another process wrote the manifest meanwhile; its checkpoint is valid.
        OSError: the manifest could not be written, and the checkpoint is not valid.
    """
    marker.write(seal(json.dumps({"step": step, "files": listed})))


def read(folder: str) -> dict[str, StoredFile]:
    """Returns the files of a checkpoint by name.

    Raises:
        OSError, ValueError: the manifest is missing or damaged.
        UserError: an earlier version of tftpu wrote it.
    """
    listed = _list_blocks(files.read(files.join(folder, FILE)))
    return {name: StoredFile(files.join(folder, name), found) for name, found in listed.items()}


def compute_digest(folder: str) -> str:
    """Returns a digest of a checkpoint's manifest, which identifies the values of the checkpoint.

    Raises:
        OSError: the manifest is missing.
    """
    return hashlib.blake2b(files.read(files.join(folder, FILE)), digest_size=8).hexdigest()


def _list_blocks(manifest: bytes) -> dict[str, list[Block]]:
    """Parses a manifest; returns the blocks of each file.

    Raises:
        ValueError: the manifest is damaged.
        UserError: an earlier version of tftpu wrote it.
    """
    check_seal(manifest)
    try:
        record = json.loads(manifest.decode())
    except RecursionError:
        raise ValueError(f"{FILE} is nested too deeply") from None
    listed = record.get("files") if isinstance(record, dict) else None
    if not isinstance(listed, dict):
        raise ValueError(f"{FILE} lists no files")
    if any(isinstance(blocks, dict) and "crc32c" in blocks for blocks in listed.values()):
        raise UserError(
            "An earlier version of tftpu wrote the checkpoints of this workdir, and this version "
            "cannot resume from them. Use the earlier version, or start a new run from their "
            "weights with model.init_from=WORKDIR/checkpoints/STEP."
        )
    for name, blocks in listed.items():
        if not isinstance(blocks, list) or not blocks or not all(map(_is_block, blocks)):
            raise ValueError(f"{FILE} has no checksums for {name!r}")
        if not re.fullmatch(r"\w[\w.-]*", name):  # the name must not lead out of the folder
            raise ValueError(f"{FILE} lists {name!r}, which is not a file of a checkpoint")
    if "state.json" not in listed:
        raise ValueError(f"{FILE} does not list state.json")
    return {name: [Block(*block) for block in blocks] for name, blocks in listed.items()}


def _is_block(value: object) -> bool:
    if not isinstance(value, list) or len(value) != len(Block._fields):
        return False
    return all(type(number) is int and number >= 0 for number in value)


def remove_checkpoint(folder: str) -> None:
    """Removes a checkpoint. Its manifest is removed first, which makes it invalid."""
    files.remove(files.join(folder, FILE))
    files.remove_tree(folder)


def list_folders(checkpoints: str) -> list[int]:
    """Returns the steps of all checkpoint folders in order, complete or not."""
    names = files.list_names(checkpoints)
    # `int` would also accept "07" and "1_0", but no checkpoint is saved under such a name.
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))


def list_steps(checkpoints: str) -> list[int]:
    """Returns the steps of the complete checkpoints in order."""
    return [
        step
        for step in list_folders(checkpoints)
        if files.exists(files.join(checkpoints, str(step), FILE))
    ]


class _Summed:
    """An iterable over the bytes of a file's blocks; records each block's size and checksum."""

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self.found: list[Block] = []

    def __iter__(self) -> Iterator[bytes]:
        self.found = []
        return cut_pieces(self._sum())

    def _sum(self) -> Iterator[bytes | memoryview]:
        for block in self._blocks():
            crc32c = 0
            for piece in cut_pieces([block]):
                crc32c = google_crc32c.extend(crc32c, piece)
            self.found.append(Block(len(block), crc32c))
            yield block
