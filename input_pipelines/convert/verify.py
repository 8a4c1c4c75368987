"""Verification of a data set: reads all its shards and compares them with the manifest."""

import dataclasses
import os
from collections.abc import Iterator

from tftpu.errors import UserError
from tftpu.input_pipelines.augment import decode
from tftpu.input_pipelines.convert import processes
from tftpu.input_pipelines.formats import manifest as manifests
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Manifest, Shard
from tftpu.storage import files
from tftpu.storage.buckets import BucketError

_BATCH = 256  # records parsed at a time
# Up to this many bytes, one process is used: at 10 MiB/s for pictures, it has checked them before
# other processes have loaded TensorFlow.
_ALONE = 2**26
AT_MOST = 20  # broken records reported per shard


def run(folder: str, workers: int = 0) -> tuple[Manifest, list[str]]:
    """Checks the checksum, record count and index of every shard, and parses every record.

    Args:
        folder: the folder of the data set, local or `gs://`.
        workers: number of processes; 0: one per core.

    Returns:
        The manifest, and a text about each problem that names the file and the record.
    """
    found = manifests.read(folder)
    shards = [shard for split in found.splits.values() for shard in split]
    tasks = len(shards) if sum(shard.bytes for shard in shards) > _ALONE else 1
    with processes.parallel_map(workers or os.cpu_count() or 1, tasks) as each:
        problems = each(_ShardCheck(found, shards), range(len(shards)))
    return found, [problem for of_shard in problems for problem in of_shard]


@dataclasses.dataclass(frozen=True)
class _ShardCheck:
    """A check of single shards that can be sent to worker processes."""

    manifest: Manifest
    shards: list[Shard]

    def __call__(self, number: int) -> list[str]:
        import tensorflow as tf

        shard = self.shards[number]
        path = self.manifest.build_path(shard)
        try:
            return self._find_problems(shard, path)
        except (OSError, tf.errors.OpError) as error:
            return [f"{path} cannot be read: {error}"]

    def _find_problems(self, shard: Shard, path: str) -> list[str]:
        if not files.exists(path):
            return [f"{path} is missing."]
        problems = []
        if shard.crc32c and tfrecord.compute_checksum(path) != shard.crc32c:
            problems.append(f"{path} has another CRC32C than the manifest states: it was changed.")
        return [*problems, *_check_records(path, shard, self.manifest)]


def _check_records(path: str, shard: Shard, manifest: Manifest) -> Iterator[str]:
    """Yields the problems of a shard's records."""
    count, named, batch = 0, 0, []
    offsets = []
    try:
        for position, record in tfrecord.read_records(path, manifest.compression):
            if count % manifests.INDEX_EVERY == 0:
                offsets.append(position)
            batch.append(record)
            count += 1
            if len(batch) == _BATCH:
                for problem in _check_batch(path, count - len(batch), batch, manifest):
                    named += 1
                    yield problem
                    if named == AT_MOST:
                        yield f"{path}: the check stops here; there may be more broken records."
                        return
                batch = []
        yield from _check_batch(path, count - len(batch), batch, manifest)
    except BucketError:
        raise
    except UserError as error:  # the record after a corrupt one cannot be found
        yield str(error)
        return
    if count != shard.examples:
        yield f"{path} has {count} records, but {shard.examples} in the manifest."
    elif shard.offsets and tuple(offsets) != tuple(shard.offsets):
        yield f"{path}: the index in the manifest does not match the file's records."


def _check_batch(path: str, first: int, batch: list[bytes], manifest: Manifest) -> Iterator[str]:
    """Yields the problems of a batch of records; parses them singly only if there are any."""
    import tensorflow as tf

    from tftpu.input_pipelines.formats import example_proto

    if not batch:
        return
    parse = example_proto.build_parser(manifest.features)
    images = [name for name, f in manifest.features.items() if f.encoding == "image"]

    def check(batch: list[bytes], names: list[str]) -> None:
        examples = parse(tf.constant(batch), tf.constant(names))
        for image in images:
            for data in examples[image].numpy():
                if why := decode.explain_failure(data):
                    raise tf.errors.DataLossError(None, None, f"{image!r} {why}")

    names = [f"record {first + n} of {path}" for n in range(len(batch))]
    try:
        check(batch, names)
    except tf.errors.OpError:
        for record, name in zip(batch, names):
            try:
                check([record], [name])
            except tf.errors.OpError as error:
                yield f"{name}{_name_source(record)}: {' '.join(error.message.split())}"


def _name_source(record: bytes) -> str:
    """Returns " (made from FILE)" if a record can be read and names its source; otherwise ""."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError:
        return ""
    names = features[manifests.SOURCE].bytes_list.value if manifests.SOURCE in features else ()
    return f" (made from {names[0].decode(errors='replace')})" if names else ""
