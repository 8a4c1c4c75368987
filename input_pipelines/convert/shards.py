"""The second stage of a conversion: shards from the staged records."""

import dataclasses
import json
import os
from pathlib import Path

from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.plan import Plan
from tftpu.input_pipelines.convert.staging import Staging
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Shard
from tftpu.storage import buckets, files


@dataclasses.dataclass(frozen=True)
class Maker:
    """A writer of shards, which records each finished one in the staging folder.

    Args:
        conversion: in progress.
        staging: of the records.
        planned: the place of every record.
        existing: bytes of the files in the output, by name.
    """

    conversion: Conversion
    staging: Staging
    planned: Plan
    existing: dict[str, int]

    def __call__(self, shard: int) -> Shard:
        name = self.conversion.shard_name(shard, self.planned.shards)
        note = self.staging.folder / f"{name}.json"
        if note.exists():
            made = Shard(**json.loads(note.read_text()))
            if self.existing.get(name) == made.bytes:
                return dataclasses.replace(made, offsets=tuple(made.offsets))
        records = self.staging.records(self.planned, shard)
        made = put(self.conversion, name, records, self.staging.folder)
        files.write_whole(str(note), json.dumps(dataclasses.asdict(made)).encode())
        return made


def put(conversion: Conversion, name: str, records: list[bytes], scratch: Path) -> Shard:
    """Writes a shard into the output.

    Args:
        conversion: in progress.
        name: of the file.
        records: of the shard.
        scratch: a local folder, where shards are made before their upload to a bucket.
    """
    remote = files.is_remote(conversion.output)
    folder = str(scratch) if remote else conversion.output
    made = tfrecord.write(os.path.join(folder, name), records, conversion.compression)
    if remote:
        path = os.path.join(folder, name)
        buckets.upload({name: path}, conversion.output)
        os.unlink(path)
    return made


def existing(folder: str) -> dict[str, int]:
    """Returns the bytes of the files in an output folder, by name."""
    if files.is_remote(folder):
        return {name: file.bytes for name, file in buckets.listing(folder).items()}
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
