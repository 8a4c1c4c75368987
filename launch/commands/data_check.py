"""`tftpu data check`: are the data of a config fit for a TPU, and does this host keep up?"""

import dataclasses
import json
import math
import os
import re
import sys
import time
from typing import Any

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.storage import files

SECONDS = 5.0  # that the pipeline is timed for
_SMALL, _LARGE = 8 << 20, 1 << 30  # bytes of a shard
_MEMORY = 0.5  # of the host's, which the pipeline may take


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found: "ok", "warning" or "error", and a sentence."""

    level: str
    text: str


def run(
    experiment: Experiment,
    config: str,
    workdir: str | None,
    hosts: int,
    need: float | None,
    zone: str | None,
) -> None:
    """Prints what was found.

    Args:
        experiment: the config.
        config: its name.
        workdir: its `preflight.json` tells the step time of each slice.
        hosts: that will share the global batch.
        need: examples a second that the TPU takes; None: as `preflight.json` says.
        zone: of the TPU, to compare with the bucket's region.

    Raises:
        UserError: something is wrong.
    """
    from tftpu import input_pipelines

    data = experiment.data
    if need is not None and need <= 0:
        raise UserError(f"--need={need}: it must be above 0.")
    pipeline = input_pipelines.training(data, experiment.train.seed)
    announced = input_pipelines.batch_spec(data, data.global_batch_size // hosts)
    found = shapes(pipeline.starting_at(0, 0, hosts).element_spec, announced)
    if not any(finding.level == "error" for finding in found):
        found += shards(pipeline, hosts) + memory(pipeline, hosts, host_memory())
        found += region(data.data_dir, zone)
        needs = {"the TPU": need} if need else predicted(workdir or files.join("runs", config))
        found += speed(measured(pipeline, hosts), needs, hosts)
    for finding in found:
        print(f"  {finding.level:9}{finding.text}")
    sys.stdout.flush()
    errors = sum(finding.level == "error" for finding in found)
    if errors:
        raise UserError(f"data check found {errors} error(s) in {config}.")


def shapes(spec: Any, announced: Any) -> list[Finding]:
    """Whether batches have static shapes and dtypes of a device, and are what preflight compiles.

    Args:
        spec: of the dataset's elements.
        announced: what `batch_spec` says.
    """
    import tensorflow as tf

    found = []
    for part in tf.nest.flatten(spec):
        if None in part.shape:
            found.append(Finding("error", f"{part} has no static shape: a TPU program is fixed."))
        if part.dtype in (tf.string, tf.int64, tf.float64):
            found.append(Finding("error", f"{part}: {part.dtype.name} does not belong on a TPU."))
    expected = tf.nest.flatten(announced)
    if tf.nest.flatten(spec)[: len(expected)] != expected:  # weights may follow
        found.append(Finding("error", f"Batches are {spec}, and were announced as {announced}."))
    parts = [f"{p.dtype.name}{list(p.shape)}" for p in tf.nest.flatten(spec)]
    return found or [Finding("ok", f"a host's batch is {', '.join(parts)}")]


def shards(pipeline: Any, hosts: int) -> list[Finding]:
    """Whether the files are as many and as large as the hosts want them."""
    from tftpu.input_pipelines.reading.shards import Shards

    source = getattr(pipeline, "source", None)
    if not isinstance(source, Shards):
        return []
    count = len(source.pieces)
    sizes = [piece.bytes for piece in source.pieces]
    mean = sum(sizes) / count
    tracks = source.tracks(pipeline.global_batch_size).number
    found = []
    if tracks % hosts:
        found.append(
            Finding(
                "warning",
                f"{count} shards make {tracks} streams, which {hosts} hosts cannot share evenly: "
                f"some examples are read by several hosts. Convert to a multiple of {hosts} shards "
                "(--min_shards), and let it divide the global batch.",
            )
        )
    if mean < _SMALL and count > hosts and files.is_remote(source.pieces[0].path):
        text = f"shards of {_mib(mean)} are small, and slow to open in a bucket: about 150 is good"
        found.append(Finding("warning", text))
    if mean > _LARGE:
        found.append(Finding("warning", f"shards of {_mib(mean)} are large: about 150 is good"))
    if source.compression or not all(piece.offsets for piece in source.pieces):
        text = (
            "the shards have no index (or are compressed): to go on inside one it is read through"
        )
        found.append(Finding("warning", text))
    summary = f"{source.count:,} examples in {count} shards of {_mib(mean)}, in {tracks} streams"
    return [Finding("ok", summary), *found]


def memory(pipeline: Any, hosts: int, limit: int) -> list[Finding]:
    """Whether what the pipeline holds fits into the host's memory.

    Args:
        limit: bytes of that memory.
    """
    import tensorflow as tf

    if hasattr(pipeline, "examples"):
        held = sum(array.nbytes for array in tf.nest.flatten(pipeline.examples))
        what = "the whole data set"
    elif hasattr(pipeline.source, "memory"):
        held = pipeline.source.memory(pipeline.global_batch_size, hosts)
        what = f"shuffling {pipeline.source.shuffle:,} examples"
    else:
        held, what = 0, "a list of files"
    spec = pipeline.starting_at(0, 0, hosts).element_spec
    batch = sum(part.dtype.size * math.prod(part.shape) for part in tf.nest.flatten(spec))
    held += 4 * batch  # being made, waiting, and on the way to the device
    text = f"{what} and 4 batches take {_mib(held)} of this host's {_mib(limit)}"
    if held > limit:
        return [Finding("error", f"{text}: lower data.shuffle or data.global_batch_size.")]
    if held > _MEMORY * limit:
        return [Finding("warning", f"{text}: lower data.shuffle if the run is killed for it.")]
    return [Finding("ok", text)]


def region(data_dir: str | None, zone: str | None) -> list[Finding]:
    """Whether the bucket lies where the TPU is."""
    match = re.match(r"gs://([^/]+)", data_dir or "")
    if not match:
        return []
    if not zone:
        return [Finding("ok", "not compared: the bucket's region, for want of --zone of the TPU")]
    from tftpu.storage import buckets

    where = buckets.location(match[1]).lower()
    text = f"the bucket {match[1]} lies in {where}, the TPU in {zone}"
    continent = {"us": "us-", "eu": "europe-"}.get(where)
    same = zone.startswith(continent) if continent else zone.rpartition("-")[0] == where
    if same:
        return [Finding("ok", text)]
    return [Finding("warning", f"{text}: reading across regions is slow, and is charged for.")]


def measured(pipeline: Any, hosts: int) -> float:
    """Examples a second that this host makes of its share, after a batch to warm up."""
    share = pipeline.global_batch_size // hosts
    batches = iter(pipeline.starting_at(0, 0, hosts))
    next(batches)
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < SECONDS:
        next(batches)
        count += 1
    return count * share / (time.perf_counter() - start)


def predicted(workdir: str) -> dict[str, float]:
    """Examples a second that each slice of the workdir's `preflight.json` takes, by its name."""
    path = files.join(workdir, "preflight.json")
    if not files.exists(path):
        return {}
    return {
        item["slice"]: item["examples_per_second"]
        for item in json.loads(files.read(path))["slices"]
        if item.get("examples_per_second")
    }


def speed(rate: float, needs: dict[str, float], hosts: int) -> list[Finding]:
    """Whether hosts like this one keep up.

    Args:
        rate: examples a second of this host.
        needs: examples a second that each slice takes, by name.
        hosts: that there will be.
    """
    if not needs:
        text = (
            f"this host gives {rate:,.0f} examples/s; whether that is enough, --need=N or a "
            "`tftpu preflight` of this config would tell"
        )
        return [Finding("ok", text)]
    found = []
    for name, need in needs.items():
        wanted = max(1, math.ceil(need / rate))
        text = f"this host gives {rate:,.0f} examples/s, {name} needs {need:,.0f}"
        if wanted <= hosts:
            text += f": {hosts} host{'s are' if hosts > 1 else ' is'} enough"
            found.append(Finding("ok", text))
        else:
            text += f": {wanted} hosts like this one, or a tf.data service (data.service)"
            found.append(Finding("warning", text))
    return found


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _mib(size: float) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
