"""The first stage of a conversion: the parts of the source as files of records.

FOLDER/conversion            the fingerprint of the conversion that the files belong to
       part-<n>              the records of a part
       part-<n>.npy          the bytes of each of them; written last
       part-<n>.skipped      the files that were left out of it, if any
       part-<n>.hashes.npy   a hash of each of them, if the source has no order
       order.npy             the order of all records by hash, likewise
       <shard>.json          a shard that is finished
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.plan import Plan
from tftpu.input_pipelines.convert.readers.reader import Reader, Skipped
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import SOURCE, Feature
from tftpu.input_pipelines.reading.cache_folder import cache_folder
from tftpu.storage import claims, files


def encoded(reader: Reader, part: int) -> Iterator[bytes | Skipped]:
    """Yields the records of a part, in order, and what was left out.

    Raises:
        UserError: an example that does not fit the reader's features; names the part.
    """
    from tftpu.input_pipelines.formats import example_proto

    for number, example in enumerate(reader.examples(reader.parts[part])):
        if isinstance(example, Skipped):
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
    """A staging folder, with methods to fill and read it. Sent to worker processes.

    Args:
        reader: of the source.
        folder: local.
    """

    reader: Reader
    folder: Path

    def done(self) -> int:
        """Returns the number of parts that are staged."""
        return sum(self._lengths(part).exists() for part in range(len(self.reader.parts)))

    def stage(self, part: int) -> np.ndarray:
        """Encodes a part, unless it is staged; returns the bytes of each record in the file."""
        if not self._lengths(part).exists():
            lengths, hashes, skipped = [], [], []

            def measured() -> Iterator[bytes]:
                for record in encoded(self.reader, part):
                    if isinstance(record, Skipped):
                        skipped.append(dataclasses.astuple(record))
                        continue
                    lengths.append(len(record) + tfrecord.OVERHEAD)
                    if not self.reader.ordered:
                        hashes.append(hashlib.blake2b(record, digest_size=16).digest())
                    yield record

            tfrecord.write(str(self.folder / f"part-{part}"), measured())
            if not self.reader.ordered:
                _save(self.folder / f"part-{part}.hashes.npy", np.array(hashes, "S16"))
            if skipped:
                files.write_whole(self._skipped(part), json.dumps(skipped).encode())
            _save(self._lengths(part), np.array(lengths, np.int64))
        return np.load(self._lengths(part))

    def skipped(self) -> list[Skipped]:
        """Returns what was left out of all parts, in their order."""
        notes = filter(Path.exists, map(self._skipped, range(len(self.reader.parts))))
        return [Skipped(*row) for note in notes for row in json.loads(note.read_text())]

    def put_in_order(self) -> None:
        """Records the order of the records by their content, regardless of their parts."""
        parts = range(len(self.reader.parts))
        hashes = [np.load(self.folder / f"part-{part}.hashes.npy") for part in parts]
        _save(self.folder / "order.npy", np.argsort(np.concatenate(hashes), kind="stable"))

    def records(self, planned: Plan, shard: int) -> list[bytes]:
        """Returns the records of a shard, read part by part."""
        records = planned.records_of(shard)
        if not self.reader.ordered:
            records = np.load(self.folder / "order.npy", mmap_mode="r")[records]
        of_part, number = planned.located(records)
        found = [b""] * len(number)
        for part in np.unique(of_part):
            lengths = np.load(self._lengths(part))
            begins = np.cumsum(lengths) - lengths
            with open(self.folder / f"part-{part}", "rb") as file:
                wanted = np.flatnonzero(of_part == part)
                for place in wanted[np.argsort(number[wanted])]:
                    file.seek(int(begins[number[place]]) + 12)  # after length and checksum
                    found[place] = file.read(int(lengths[number[place]]) - tfrecord.OVERHEAD)
        return found

    def _skipped(self, part: int) -> Path:
        return self.folder / f"part-{part}.skipped"

    def _lengths(self, part: int) -> Path:
        return self.folder / f"part-{part}.npy"


def folder_of(conversion: Conversion, given: str | None) -> Path:
    """Returns the staging folder of a conversion.

    Args:
        conversion: to stage.
        given: a local folder to put it in; None: in a local output, or in the cache folder.
    """
    name = f".converting-{conversion.split}"
    if not given and not files.is_remote(conversion.output):
        return Path(conversion.output) / name
    key = hashlib.sha256(conversion.output.encode()).hexdigest()[:16]
    return Path(given or cache_folder()) / f"{name}-{key}"


@contextlib.contextmanager
def claimed(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds a staging folder; waits for another process that makes the same conversion."""
    said = False
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(claims.claim(str(folder)))
                break
            except claims.HeldError:
                if not said:
                    say(f"Another process is making this conversion in {folder}: waiting for it.")
                said = True
                time.sleep(0.2)
        yield


def begin(folder: Path, conversion: Conversion, reader: Reader) -> None:
    """Removes partial files, and leftovers of another conversion in the staging folder."""
    output = conversion.output
    note = folder / "conversion"
    parts = hashlib.sha256(json.dumps(reader.parts).encode()).hexdigest()
    text = f"{conversion.fingerprint(reader)} {parts}"
    if note.exists() and note.read_text() != text:
        for path in (*folder.glob("part-*"), *folder.glob("*.json")):
            path.unlink()
    files.write_whole(str(note), text.encode())
    if not files.is_remote(output):
        os.makedirs(output, exist_ok=True)  # with a staging folder elsewhere it may not exist yet
        for path in Path(output).glob(f".{conversion.split}-*.tmp"):  # no other split's
            path.unlink(missing_ok=True)
    for path in (*folder.glob(".*.tmp"), *folder.glob(".*.npy")):
        path.unlink(missing_ok=True)


def _save(path: Path, array: np.ndarray) -> None:
    """Writes an array atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.npy")
    np.save(temporary, array)
    os.replace(temporary, path)
