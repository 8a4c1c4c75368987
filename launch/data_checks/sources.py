"""Checks the shapes of batches, the shards and the memory they need, and the bucket's region."""

import math
import os
import re
import sys
from typing import Any

import numpy as np

from tftpu.amounts import format_size
from tftpu.errors import counted
from tftpu.launch.data_checks import Pipeline
from tftpu.launch.data_checks.finding import Finding
from tftpu.storage import files

_SMALL, _LARGE = 8 << 20, 1 << 30  # bytes below and above which a shard is small or large
_MEMORY = 0.5  # largest share of the host's memory that the pipeline may take


def inspect_shapes(spec: Any, announced: Any) -> list[Finding]:
    """Checks that a TPU can take the batches, and that they match what preflight compiles.

    Args:
        spec: element spec of the dataset.
        announced: the element spec that the data's `batch_spec()` returns.
    """
    import tensorflow as tf

    found = []
    for part in tf.nest.flatten(spec):
        if None in part.shape:
            found.append(Finding("error", f"{part} has no static shape, which a TPU needs."))
        if part.dtype in (tf.string, tf.int64, tf.float64):
            found.append(Finding("error", f"{part}: a TPU does not support {part.dtype.name}."))
    expected = tf.nest.flatten(announced)
    if tf.nest.flatten(spec)[: len(expected)] != expected:  # sample weights may follow
        found.append(Finding("error", f"Batches are {spec}; batch_spec() returns {announced}."))
    parts = [f"{p.dtype.name}{list(p.shape)}" for p in tf.nest.flatten(spec)]
    return found or [Finding("ok", f"a host's batch is {', '.join(parts)}")]


def inspect_plain(hosts: int) -> list[Finding]:
    """Reports the disadvantages of a plain `tf.data.Dataset` in comparison with a pipeline."""
    text = "the data are a tf.data.Dataset: a resumed run reads earlier batches again"
    found = [Finding("ok", text)]
    if hosts > 1:
        text = f"each of {hosts} hosts reads all of the tf.data.Dataset, and trains on its share"
        found.append(Finding("warning", text))
    return found


def inspect_shards(pipeline: Pipeline, hosts: int) -> list[Finding]:
    """Checks that the hosts can share the shards evenly, and the size and index of the shards."""
    from tftpu.input_pipelines.reading.shards import Shards

    source = getattr(pipeline, "source", None)
    if not isinstance(source, Shards):
        return []
    count = len(source.pieces)
    sizes = [piece.bytes or 0 for piece in source.pieces]
    mean = sum(sizes) / count
    tracks = source.plan_tracks(pipeline.global_batch_size).number
    found = []
    if tracks % hosts:
        found.append(
            Finding(
                "warning",
                f"{count} shards make {tracks} streams, which {hosts} hosts cannot share evenly: "
                "some examples are read by several hosts. Choose a number of shards (--min_shards) "
                f"that is a multiple of {hosts} and divides the global batch.",
            )
        )
    if mean < _SMALL and count > hosts and files.is_remote(source.pieces[0].path):
        size = format_size(mean)
        text = f"shards of {size} are small, and slow to open in a bucket: about 150 MiB is best"
        found.append(Finding("warning", text))
    if mean > _LARGE:
        found.append(
            Finding("warning", f"shards of {format_size(mean)} are large: about 150 MiB is best")
        )
    if source.compression or not all(piece.offsets for piece in source.pieces):
        text = "the shards have no index (or are compressed): resuming inside one reads all of it"
        found.append(Finding("warning", text))
    summary = (
        f"{counted(source.count, 'example')} in {counted(count, 'shard')} of {format_size(mean)}, "
        f"in {counted(tracks, 'stream')}"
    )
    return [Finding("ok", summary), *found]


def inspect_memory(pipeline: Pipeline, hosts: int, limit: int) -> list[Finding]:
    """Checks that the pipeline's buffers fit into the memory of the host.

    Args:
        pipeline: the pipeline of the training split.
        hosts: number of hosts that share a batch.
        limit: the host's memory in bytes.
    """
    import tensorflow as tf

    source = getattr(pipeline, "source", pipeline)  # a user's pipeline may have no source
    if hasattr(source, "examples"):
        held = sum(_count_bytes(array) for array in tf.nest.flatten(source.examples))
        what = "the whole data set and 4 batches"
    elif hasattr(source, "estimate_memory"):
        held = source.estimate_memory(pipeline.global_batch_size, hosts)
        what = f"shuffling {min(source.shuffle, source.count):,} examples and 4 batches"
    else:
        held, what = 0, "4 batches"
    spec = pipeline.starting_at(0, 0, hosts).element_spec
    batch = sum(part.dtype.size * math.prod(part.shape) for part in tf.nest.flatten(spec))
    held += 4 * batch  # batches being made, waiting, and on the way to the device
    text = f"{what} take {format_size(held)} of this host's {format_size(limit)}"
    if held > limit:
        return [Finding("error", f"{text}: lower data.shuffle or data.global_batch_size.")]
    if held > _MEMORY * limit:
        return [Finding("warning", f"{text}: lower data.shuffle if the run is killed.")]
    return [Finding("ok", text)]


def _count_bytes(array: np.ndarray) -> int:
    """Returns the size of an array's elements in bytes, including texts."""
    return array.nbytes if array.dtype != object else sum(map(sys.getsizeof, array.flat))


def read_host_memory() -> int:
    """Returns the size of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def inspect_region(data_dir: str | None, zone: str | None) -> list[Finding]:
    """Checks that the data, if they are in a bucket, are in the region of the TPU's zone."""
    match = re.match(r"gs://([^/]+)", data_dir or "")
    if not match:
        return [Finding("ok", "the data is not in a bucket: --zone has no effect")] if zone else []
    if not zone:
        return [Finding("ok", "region of the bucket not checked: give --zone of the TPU")]
    from tftpu.storage import buckets

    where = buckets.find_location(match[1]).lower()
    text = f"the bucket {match[1]} is in {where}, the TPU in {zone}"
    continent = {"us": "us-", "eu": "europe-"}.get(where)
    same = zone.startswith(continent) if continent else zone.rpartition("-")[0] == where
    if same:
        return [Finding("ok", text)]
    return [Finding("warning", f"{text}: reading across regions is slow, and costs extra.")]
