"""Reads a data set of shards from end to end and compares it with its manifest."""

import dataclasses
import os
from collections.abc import Iterator

from tftpu.errors import UserError
from tftpu.input_pipelines.convert import processes
from tftpu.input_pipelines.formats import manifest as manifests
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Manifest, Shard
from tftpu.storage import files

_BATCH = 256  # records parsed at a time
AT_MOST = 20  # broken records named of one shard


def run(folder: str, workers: int = 0) -> tuple[Manifest, list[str]]:
    """Every shard's size, checksum and number of records; every record, by the features.

    Args:
        folder: of the data set, local or `gs://`.
        workers: processes; 0: one for each core.

    Returns:
        The manifest, and a sentence for everything that is not as it says, with the file and the
        record.
    """
    found = manifests.read(folder)
    shards = [shard for split in found.splits.values() for shard in split]
    with processes.each(workers or os.cpu_count(), len(shards)) as each:
        problems = each(_Check(found, shards), range(len(shards)))
    return found, [problem for of_shard in problems for problem in of_shard]


@dataclasses.dataclass(frozen=True)
class _Check:
    """Checks one shard after another, in whatever process."""

    manifest: Manifest
    shards: list[Shard]

    def __call__(self, number: int) -> list[str]:
        import tensorflow as tf

        shard = self.shards[number]
        path = self.manifest.path(shard)
        try:
            return self._problems(shard, path)
        except (OSError, tf.errors.OpError) as error:
            return [f"{path} cannot be read: {error}"]

    def _problems(self, shard: Shard, path: str) -> list[str]:
        if not files.exists(path):
            return [f"{path} is missing."]
        problems = []
        if shard.crc32c and tfrecord.checksum(path) != shard.crc32c:
            problems.append(f"{path} is not the file that the manifest was written for: CRC32C.")
        return [*problems, *_records(path, shard, self.manifest)]


def _records(path: str, shard: Shard, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the records of a shard."""
    count, named, batch = 0, 0, []
    offsets = []
    try:
        for position, record in tfrecord.records(path, manifest.compression):
            if count % manifests.INDEX_EVERY == 0:
                offsets.append(position)
            batch.append(record)
            count += 1
            if len(batch) == _BATCH:
                for problem in _parsed(path, count - len(batch), batch, manifest):
                    named += 1
                    yield problem
                    if named == AT_MOST:
                        yield f"{path}: and perhaps more; the rest of it was not looked at."
                        return
                batch = []
        yield from _parsed(path, count - len(batch), batch, manifest)
    except UserError as error:  # a corrupt record: nothing after it can be found
        yield str(error)
        return
    if count != shard.examples:
        yield f"{path} has {count} records, and {shard.examples} by the manifest."
    elif shard.offsets and tuple(offsets) != tuple(shard.offsets):
        yield f"{path}: the index in the manifest does not fit."


def _parsed(path: str, first: int, batch: list[bytes], manifest: Manifest) -> Iterator[str]:
    """The records of a batch that cannot be parsed; all at once if all can."""
    import tensorflow as tf

    from tftpu.input_pipelines.formats import example_proto

    if not batch:
        return
    parse = example_proto.parser(manifest.features)
    images = [name for name, f in manifest.features.items() if f.encoding == "image"]

    def check(batch, names):
        examples = parse(tf.constant(batch), tf.constant(names))
        for name in images:
            for image in examples[name]:
                tf.io.decode_image(image, expand_animations=False)

    names = [f"record {first + n} of {path}" for n in range(len(batch))]
    try:
        check(batch, names)
    except tf.errors.OpError:
        for record, name in zip(batch, names):
            try:
                check([record], [name])
            except tf.errors.OpError as error:
                yield f"{name}: {' '.join(error.message.split())}"
