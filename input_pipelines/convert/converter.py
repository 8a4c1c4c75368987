"""Any source to shards of TFRecord: shuffled, balanced, the same bytes however often it was killed.

1. Each part of the source (`parts`) is encoded into a file of records in a staging folder.
2. The number of records and their bytes give the number of shards. Record i of the whole goes to
   the place that a permutation by the seed gives it, so each shard is made on its own from the
   records that belong there.
3. The manifest is written last, when every shard is there.

Every file appears whole or not at all, and what is in it depends on the source and the options
alone, not on who makes it or when. (Where a source has no order, as BigQuery, the records are put
into the order of their hashes before 2.) So a conversion that is given again goes on with the
files that are missing, and any number of processes, or a Beam job (`convert_beam`), makes the same
bytes.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tftpu.errors import UserError
from tftpu.input_pipelines.convert import parts, processes
from tftpu.input_pipelines.convert.plan import Plan
from tftpu.input_pipelines.formats import manifest as manifests
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Manifest, Shard
from tftpu.storage import buckets, files

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What is converted, and into what.

    Args:
        source: its address, as `parts` reads it.
        output: a folder, local or `gs://`, that holds this data set or nothing.
        options: how the source is read, and what split it becomes.
        seed: of the shuffle.
        shard_mb: about the size of a shard in MiB; all have as many examples as the others, or one
            more.
        min_shards: at least so many, as every host wants one of its own.
        compression: "" or "GZIP".
    """

    source: str
    output: str
    options: parts.Options = dataclasses.field(default_factory=parts.Options)
    seed: int = 0
    shard_mb: float = 150
    min_shards: int = 1
    compression: str = ""

    def validate(self) -> None:
        """Raises `UserError` for a value that is not allowed."""
        if self.shard_mb <= 0:
            raise UserError(f"--shard_mb={self.shard_mb}: it must be above 0.")
        if self.min_shards < 1:
            raise UserError(f"--min_shards={self.min_shards}: it must be 1 or more.")
        if self.compression not in manifests.COMPRESSIONS:
            raise UserError(f"--compression={self.compression}: write GZIP, or leave it out.")

    @property
    def split(self) -> str:
        """The split's name in the output."""
        return self.options.output_split

    def fingerprint(self, source: parts.Source) -> str:
        """Another for other bytes: of the options and the state of the source."""
        options = dataclasses.asdict(self.options)
        if self.options.tokenizer:
            options["tokenizer"] = buckets.checksum(self.options.tokenizer).crc32c
        made_of = {**dataclasses.asdict(self), "options": options, "output": ""}
        made_of["shard_mb"] = float(self.shard_mb)
        made_of["state"] = source.state
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def plan(conversion: Conversion, counts: list[int], size: int) -> Plan:
    """The plan for so many records of each part, `size` bytes in all.

    Raises:
        UserError: there are fewer records than there have to be shards.
    """
    examples = sum(counts)
    if examples < conversion.min_shards:
        raise UserError(
            f"{conversion.source} has {examples:,} examples: too few for --min_shards="
            f"{conversion.min_shards}."
        )
    shards = round(size / (conversion.shard_mb * MIB))
    shards = min(max(shards, conversion.min_shards, 1), examples)
    return Plan(tuple(counts), shards, conversion.seed)


def shard_name(split: str, shard: int, shards: int) -> str:
    """The name of a shard's file."""
    return f"{split}-{shard:05d}-of-{shards:05d}.tfrecord"


def encoded(source: parts.Source, part: int) -> Iterator[bytes]:
    """The records of a part, in its order.

    Raises:
        UserError: an example that is not what the source promises; it names the part.
    """
    from tftpu.input_pipelines.formats import example_proto

    for number, example in enumerate(source.examples(source.parts[part])):
        try:
            yield example_proto.encode(example, source.features)
        except UserError as error:
            where = json.dumps(source.parts[part])[:200]
            raise UserError(f"Example {number} of {where}: {error}") from error


def begun(conversion: Conversion, source: parts.Source) -> tuple[Manifest, int] | None:
    """The manifest that the split is to be added to, and its generation; None: all is done.

    Raises:
        UserError: the folder holds another conversion of the split, or other features.
    """
    text, generation = _read_manifest(conversion.output)
    if not text:
        return Manifest(conversion.output, source.features, {}), generation
    found = manifests.from_json(text.decode(), conversion.output)
    done = found.about.get("conversions", {}).get(conversion.split)
    if done == conversion.fingerprint(source):
        return None
    if conversion.split in found.splits:
        raise UserError(
            f"{conversion.output} holds another {conversion.split!r} split already, of other data "
            "or options: choose another --output, or remove it first."
        )
    if (found.features, found.compression) != (source.features, conversion.compression):
        raise UserError(
            f"{conversion.output} holds a data set of other features or compression: choose "
            "another --output."
        )
    return found, generation


def publish(conversion: Conversion, source: parts.Source, shards: list) -> Manifest:
    """Writes the manifest with the new split: from now on the data set is there.

    The manifest is read anew: another split may have been added to it meanwhile.
    """
    with _alone(conversion.output):
        found = begun(conversion, source)
        if found is None:  # another process has made the same
            return manifests.read(conversion.output)
        return _published(conversion, source, *found, shards)


def _published(
    conversion: Conversion, source: parts.Source, before: Manifest, generation: int, shards: list
) -> Manifest:
    conversions = before.about.get("conversions", {})
    about = {
        **before.about,
        **source.about,
        "conversions": {**conversions, conversion.split: conversion.fingerprint(source)},
    }
    after = dataclasses.replace(
        before,
        splits={**before.splits, conversion.split: tuple(shards)},
        compression=conversion.compression,
        about=about,
    )
    if files.is_remote(conversion.output):
        data = manifests.to_json(after).encode()
        buckets.publish(f"{conversion.output}/{manifests.NAME}", data, generation)
    else:
        manifests.write(after)
    return after


def run(
    conversion: Conversion,
    workers: int = 0,
    staging: str | None = None,
    say: Callable[[str], None] = print,
) -> Manifest:
    """Converts on this machine.

    Args:
        conversion: what.
        workers: processes; 0: one for each core.
        staging: a local folder with room for all records, which do not stay there; None: in a
            local output, or in the cache folder.
        say: is told what goes on.

    Raises:
        UserError: a mistake, or a record that cannot be read or written.
    """
    conversion.validate()
    source = parts.source(conversion.source, conversion.options)
    folder = _staging(conversion, staging)
    if begun(conversion, source) is None:
        files.remove_tree(str(folder))  # it was killed after the manifest was there
        say(f"{conversion.output} holds all of it already.")
        return manifests.read(conversion.output)
    with _claimed(str(folder), say):
        if begun(conversion, source) is None:  # by the process that was waited for
            return manifests.read(conversion.output)
        _begin(folder, conversion.fingerprint(source), source.parts, conversion)
        job = _Job(conversion, source, folder)
        numbers = range(len(source.parts))
        with processes.each(workers or os.cpu_count(), len(source.parts)) as each:
            say(f"{len(source.parts)} parts to read, {job.staged()} of them done")
            sizes = each(job.stage, numbers)
            counts, size = [len(s) for s in sizes], sum(int(s.sum()) for s in sizes)
            planned = plan(conversion, counts, size)
            if not source.ordered:
                job.put_in_order()
            say(f"{planned.examples:,} examples, {size / MIB:,.1f} MiB: {planned.shards} shards")
            there = _sizes(conversion.output)
            shards = each(_Make(job, planned, there), range(planned.shards))
        after = publish(conversion, source, shards)
    files.remove_tree(str(folder))
    say(f"{conversion.output} is ready.")
    return after


@dataclasses.dataclass(frozen=True)
class _Job:
    """The two phases, in a staging folder; sent to the processes that do them."""

    conversion: Conversion
    source: parts.Source
    folder: Path

    def staged(self) -> int:
        return sum((self.folder / f"part-{n}.npy").exists() for n in range(len(self.source.parts)))

    def stage(self, part: int) -> np.ndarray:
        """Encodes a part; the bytes of its records as they stand in the file."""
        lengths = self.folder / f"part-{part}.npy"
        if not lengths.exists():
            found, hashes = [], []

            def measured():
                for record in encoded(self.source, part):
                    found.append(len(record) + tfrecord.OVERHEAD)
                    if not self.source.ordered:
                        hashes.append(hashlib.blake2b(record, digest_size=16).digest())
                    yield record

            tfrecord.write(str(self.folder / f"part-{part}"), measured())
            if not self.source.ordered:
                _save(self.folder / f"part-{part}.hashes.npy", np.array(hashes, "S16"))
            _save(lengths, np.array(found, np.int64))
        return np.load(lengths)

    def put_in_order(self) -> None:
        """Notes the order of the records by their content, whichever part they came in."""
        parts_of = range(len(self.source.parts))
        hashes = [np.load(self.folder / f"part-{part}.hashes.npy") for part in parts_of]
        _save(self.folder / "order.npy", np.argsort(np.concatenate(hashes), kind="stable"))

    def records(self, planned: Plan, shard: int) -> list[bytes]:
        """The records of a shard, read part by part."""
        records = planned.records_of(shard)
        if not self.source.ordered:
            records = np.load(self.folder / "order.npy", mmap_mode="r")[records]
        of_part, number = planned.located(records)
        found = [b""] * len(number)
        for part in np.unique(of_part):
            lengths = np.load(self.folder / f"part-{part}.npy")
            begins = np.cumsum(lengths) - lengths
            with open(self.folder / f"part-{part}", "rb") as file:
                wanted = np.flatnonzero(of_part == part)
                for place in wanted[np.argsort(number[wanted])]:
                    file.seek(int(begins[number[place]]) + 12)
                    found[place] = file.read(int(lengths[number[place]]) - tfrecord.OVERHEAD)
        return found


@dataclasses.dataclass(frozen=True)
class _Make:
    """Makes one shard after another; what it made is noted beside the parts."""

    job: _Job
    planned: Plan
    there: dict[str, int]  # bytes of the files of the output

    def __call__(self, shard: int) -> Shard:
        name = shard_name(self.job.conversion.split, shard, self.planned.shards)
        note = self.job.folder / f"{name}.json"
        if note.exists():
            made = Shard(**json.loads(note.read_text()))
            if self.there.get(name) == made.bytes:
                return dataclasses.replace(made, offsets=tuple(made.offsets))
        records = self.job.records(self.planned, shard)
        made = put(self.job.conversion, name, records, self.job.folder)
        files.write_whole(str(note), json.dumps(dataclasses.asdict(made)).encode())
        return made


def put(conversion: Conversion, name: str, records: list[bytes], scratch: Path) -> Shard:
    """Writes a shard where it belongs.

    Args:
        scratch: a local folder, where a shard for a bucket is made.
    """
    remote = files.is_remote(conversion.output)
    folder = str(scratch) if remote else conversion.output
    made = tfrecord.write(os.path.join(folder, name), records, conversion.compression)
    if remote:
        path = os.path.join(folder, name)
        buckets.upload({name: path}, conversion.output)
        os.unlink(path)
    return made


def _read_manifest(folder: str) -> tuple[bytes, int]:
    if files.is_remote(folder):
        return buckets.read(f"{folder}/{manifests.NAME}")
    path = files.join(folder, manifests.NAME)
    return (files.read(path), 0) if files.exists(path) else (b"", 0)


@contextlib.contextmanager
def _claimed(folder: str, say: Callable[[str], None]) -> Iterator[None]:
    """Holds a staging folder; if another process converts the same, waits for its end."""
    said = False
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(files.claim(folder))
                break
            except files.HeldError:
                if not said:
                    say(f"Another process converts the same, in {folder}: waiting for its end.")
                said = True
                time.sleep(0.2)
        yield


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """A block in which no other process of this machine adds to a local data set.

    That of a bucket has generations for it.
    """
    if files.is_remote(folder):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for path in Path(folder).glob(f".{manifests.NAME}.*.tmp"):  # of one that was killed
            path.unlink()
        yield
    finally:
        os.close(descriptor)


def _sizes(folder: str) -> dict[str, int]:
    """Bytes of the files in the output."""
    if files.is_remote(folder):
        return {name: file.bytes for name, file in buckets.listing(folder).items()}
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder)}


def _staging(conversion: Conversion, given: str | None) -> Path:
    name = f".converting-{conversion.split}"
    if not given and not files.is_remote(conversion.output):
        return Path(conversion.output) / name
    from tftpu.input_pipelines.datasets import tfds

    key = hashlib.sha256(conversion.output.encode()).hexdigest()[:16]
    return Path(given or tfds.cache_folder()) / f"{name}-{key}"


def _begin(folder: Path, fingerprint: str, names: list, conversion: Conversion) -> None:
    """Removes what another conversion left in the staging folder, and halves of files."""
    output = conversion.output
    note = folder / "conversion"
    text = f"{fingerprint} {hashlib.sha256(json.dumps(names).encode()).hexdigest()}"
    if note.exists() and note.read_text() != text:
        for path in (*folder.glob("part-*"), *folder.glob("*.json")):
            path.unlink()
    files.write_whole(str(note), text.encode())
    if not files.is_remote(output):
        os.makedirs(output, exist_ok=True)  # with --staging nothing is there yet
        for path in Path(output).glob(f".{conversion.split}-*.tmp"):  # no other split's
            path.unlink(missing_ok=True)
    for path in (*folder.glob(".*.tmp"), *folder.glob(".*.npy")):
        path.unlink(missing_ok=True)


def _save(path: Path, array: np.ndarray) -> None:
    """Writes an array, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.npy")
    np.save(temporary, array)
    os.replace(temporary, path)
