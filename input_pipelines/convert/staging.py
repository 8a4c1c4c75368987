"""The first stage of a conversion: the parts of the source as files of records.

FOLDER/conversion            the fingerprint of the conversion, and a hash of its parts
       part-<n>              the records of a part
       part-<n>.npy          the size of each record, in bytes
       part-<n>.skipped      the source's files that were skipped, if any
       part-<n>.hashes.npy   a hash of each record, if the source has no order
       part-<n>.json         sizes and checksums of these files; written last
       order.npy             the order of all records by hash, if the source has none
       <shard>.json          the description of a finished shard

A conversion that is started again compares the parts with their checksums, and makes again those
that do not match.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.plan import Plan
from tftpu.input_pipelines.convert.readers.reader import Reader, SkippedFile
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import SOURCE, Feature
from tftpu.installation import find_cache_folder
from tftpu.storage import buckets, files, locks
from tftpu.storage.owner import LockedError
from tftpu.storage.side_files import read_sealed, seal

_PIECE = 1 << 20  # bytes written at a time


def encode_part(reader: Reader, part: int) -> Iterator[bytes | SkippedFile]:
    """Yields the records of a part in order, and the files that were skipped.

    Raises:
        UserError: an example cannot be read, or does not fit the features; the message says where.
    """
    from tftpu.input_pipelines.formats import example_proto

    for number, example in enumerate(reader.read_examples(reader.parts[part])):
        if isinstance(example, SkippedFile):
            yield example
            continue
        more = {SOURCE: Feature("string")} if SOURCE in example else {}
        try:
            yield example_proto.encode(example, {**more, **reader.features})
        except UserError as error:
            where = json.dumps(reader.parts[part])[:200]
            raise UserError(f"Example {number} of {where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Staging:
    """A staging folder, with methods to fill and read it. Worker processes get a copy.

    Args:
        reader: the reader of the source.
        folder: a local folder.
    """

    reader: Reader
    folder: Path

    def count_done(self) -> int:
        """Returns the number of parts that seem to be staged; `stage_part` checks them."""
        return sum(self._build_note_path(part).exists() for part in range(len(self.reader.parts)))

    def stage_part(self, part: int) -> np.ndarray:
        """Encodes a part unless it is staged and undamaged; returns its records' sizes in bytes."""
        if not self._is_whole(part):
            self._write_part(part)
        return np.load(self._build_lengths_path(part))

    def _write_part(self, part: int) -> None:
        lengths, hashes, skipped = [], [], []

        def measure_records() -> Iterator[bytes]:
            for record in encode_part(self.reader, part):
                if isinstance(record, SkippedFile):
                    skipped.append(dataclasses.astuple(record))
                    continue
                lengths.append(len(record) + tfrecord.OVERHEAD)
                if not self.reader.ordered:
                    hashes.append(hashlib.blake2b(record, digest_size=16).digest())
                yield record

        for path in (self._build_note_path(part), self._build_skipped_path(part)):
            files.remove(path)
        made = tfrecord.write(str(self.folder / f"part-{part}"), measure_records())
        beside: dict[Path, Iterable[bytes]] = {
            self._build_lengths_path(part): _encode_npy(np.array(lengths, np.int64))
        }
        if not self.reader.ordered:
            beside[self._build_hashes_path(part)] = _encode_npy(np.array(hashes, "S16"))
        if skipped:
            beside[self._build_skipped_path(part)] = [json.dumps(skipped).encode()]
        sums = {made.name: [made.bytes, made.crc32c]}
        for path, pieces in beside.items():
            data = b"".join(pieces)
            files.write_whole(path, data)
            sums[path.name] = [len(data), f"{google_crc32c.value(data):08x}"]
        write_note(self._build_note_path(part), sums)

    def _is_whole(self, part: int) -> bool:
        """Returns whether a part is staged, and its files match their checksums."""
        sums = read_sealed(self._build_note_path(part))
        if sums is None:
            return False
        try:
            found = {name: list(buckets.describe_file(self.folder / name)[:2]) for name in sums}
        except OSError:
            return False
        return found == sums

    def list_skipped(self) -> list[SkippedFile]:
        """Returns the skipped files of all parts, in order."""
        notes = filter(Path.exists, map(self._build_skipped_path, range(len(self.reader.parts))))
        return [SkippedFile(*row) for note in notes for row in json.loads(note.read_text())]

    def save_order(self) -> None:
        """Saves the order of all records by the hashes of their content, regardless of parts."""
        parts = range(len(self.reader.parts))
        hashes = [np.load(self._build_hashes_path(part)) for part in parts]
        order = np.argsort(np.concatenate(hashes), kind="stable")
        files.write_whole(self.folder / "order.npy", _encode_npy(order))

    def read_records(self, planned: Plan, shard: int) -> list[bytes]:
        """Returns the records of a shard, in its order.

        Raises:
            UserError: a record was damaged after it was staged.
        """
        records = planned.list_records(shard)
        if not self.reader.ordered:
            records = np.load(self.folder / "order.npy", mmap_mode="r")[records]
        of_part, number = planned.locate_records(records)
        found = [b""] * len(number)
        for part in np.unique(of_part):
            lengths = np.load(self._build_lengths_path(part))
            begins = np.cumsum(lengths) - lengths
            path = self.folder / f"part-{part}"
            with open(path, "rb") as file:
                wanted = np.flatnonzero(of_part == part)
                for place in wanted[np.argsort(number[wanted])]:
                    file.seek(int(begins[number[place]]))
                    framed = file.read(int(lengths[number[place]]))
                    try:
                        found[place] = tfrecord.unframe_record(framed)
                    except ValueError as error:
                        raise UserError(
                            f"{path} was damaged after it was written: {error}. Run the same "
                            "command again: it reads this part of the source again."
                        ) from error
        return found

    def _build_note_path(self, part: int) -> Path:
        return self.folder / f"part-{part}.json"

    def _build_hashes_path(self, part: int) -> Path:
        return self.folder / f"part-{part}.hashes.npy"

    def _build_skipped_path(self, part: int) -> Path:
        return self.folder / f"part-{part}.skipped"

    def _build_lengths_path(self, part: int) -> Path:
        return self.folder / f"part-{part}.npy"


def choose_folder(conversion: Conversion, given: str | None) -> Path:
    """Returns the staging folder of a conversion.

    Args:
        conversion: the conversion to stage.
        given: a local folder to make it in; None: the output if that is local, otherwise the
            cache folder.
    """
    name = f".converting-{conversion.split}"
    if not given and not files.is_remote(conversion.output):
        return Path(conversion.output) / name
    key = hashlib.sha256(conversion.output.encode()).hexdigest()[:16]
    return Path(given or find_cache_folder("data")) / f"{name}-{key}"


@contextlib.contextmanager
def claimed(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Locks a staging folder for the `with` block; waits while another process has locked it."""
    said = False
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(locks.locked(str(folder)))
                break
            except LockedError:
                if not said:
                    say(f"Another process is making this conversion in {folder}: waiting for it.")
                said = True
                time.sleep(0.2)
        yield


def prepare_folder(folder: Path, conversion: Conversion, reader: Reader) -> None:
    """Prepares the staging and output folders: removes partial files, and another conversion's."""
    output = conversion.output
    note = folder / "conversion"
    parts = hashlib.sha256(json.dumps(reader.parts).encode()).hexdigest()
    text = f"{conversion.compute_fingerprint(reader)} {parts}"
    if not note.exists() or note.read_bytes() != text.encode():
        for path in {*folder.glob("part-*"), *folder.glob("*.json")}:
            path.unlink()
    files.write_whole(str(note), text.encode())
    if not files.is_remote(output):
        # The output may not exist yet if the staging folder is elsewhere.
        os.makedirs(output, exist_ok=True)
        # Not those of other splits, which other processes may be writing: "train-extra" of "train".
        shard = rf"\.{re.escape(conversion.split)}-\d+-of-\d+\.tfrecord\.\d+\.tmp"
        for name in files.list_names(output):
            if re.fullmatch(shard, name):
                files.remove(files.join(output, name))
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _encode_npy(array: np.ndarray) -> Iterator[bytes]:
    """Yields the content of a `.npy` file of an array, in pieces."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    yield head.getvalue()
    data = array.reshape(-1).view(np.uint8)
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE].tobytes()


def write_note(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object with its checksum into a staging folder, atomically."""
    files.write_whole(path, seal(json.dumps(value)))
