"""The second stage of a conversion: shards from the staged records."""

import dataclasses
import os
from pathlib import Path

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.plan import Plan
from tftpu.input_pipelines.convert.staging import Staging, write_note
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Shard
from tftpu.storage import buckets, files
from tftpu.storage.buckets import Stored
from tftpu.storage.side_files import read_sealed


@dataclasses.dataclass(frozen=True)
class ShardWriter:
    """A writer that is called with a shard's index, and records the shard in the staging folder.

    Args:
        conversion: the conversion in progress.
        staging: the staging of the records.
        planned: the place of every record.
        existing: the files in the output by name, as `list_existing` returns them.
    """

    conversion: Conversion
    staging: Staging
    planned: Plan
    existing: dict[str, Stored]

    def __call__(self, shard: int) -> Shard:
        name = self.conversion.format_shard_name(shard, self.planned.shards)
        note = self.staging.folder / f"{name}.json"
        kept = read_sealed(note)
        if kept is not None:
            made = Shard(**{**kept, "offsets": tuple(kept["offsets"])})
            if self._is_there(made):
                return made
        records = self.staging.read_records(self.planned, shard)
        made = write_shard(self.conversion, name, records, self.staging.folder)
        write_note(note, dataclasses.asdict(made))
        return made

    def _is_there(self, made: Shard) -> bool:
        """Returns whether the output holds an undamaged shard that an earlier process made."""
        there = self.existing.get(made.name)
        if there is None or there.bytes != made.bytes:
            return False
        path = files.join(self.conversion.output, made.name)
        return (there.crc32c or tfrecord.compute_checksum(path)) == made.crc32c


def write_shard(conversion: Conversion, name: str, records: list[bytes], scratch: Path) -> Shard:
    """Writes a shard into the output.

    Args:
        conversion: the conversion in progress.
        name: the name of the file.
        records: the records of the shard.
        scratch: a local folder in which shards are made before their upload to a bucket.

    Raises:
        UserError: the bucket cannot be written, or the file was damaged before its upload.
    """
    remote = files.is_remote(conversion.output)
    folder = str(scratch) if remote else conversion.output
    made = tfrecord.write(os.path.join(folder, name), records, conversion.compression)
    if remote:
        path = os.path.join(folder, name)
        sent = buckets.upload({name: path}, conversion.output)[name]
        if sent.crc32c != made.crc32c:
            raise UserError(f"{path} was damaged before its upload: run the same command again.")
        os.unlink(path)
    return made


def list_existing(folder: str) -> dict[str, Stored]:
    """Returns the files in an output folder by name; local files have no checksum here."""
    if files.is_remote(folder):
        return buckets.list_files(folder)
    return {entry.name: Stored(entry.stat().st_size, "") for entry in os.scandir(folder)}
