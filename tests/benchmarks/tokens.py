"""Megabytes per second of packed tokens: the whole training pipeline and TensorFlow's bare reader.

    python -m tests.benchmarks.tokens [--mib=512] [--turns=11]

Rows of 2,048 tokens in shards of 32 MiB on local disk, read from the page cache. The contestants
take turns of one pass over the data each, so that other load on the machine affects both. Prints
medians, and the median of the ratios of each turn.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import tensorflow as tf

from tftpu import input_pipelines
from tftpu.input_pipelines.formats import example_proto, manifest, tfrecord
from tftpu.input_pipelines.formats.manifest import Feature, Manifest
from tftpu.input_pipelines.sources import Tokens

CONTEXT = 2048
BATCH = 128
SHARD = 32 << 20
FEATURES = {name: Feature("uint16", (CONTEXT + 1,), "raw") for name in ("tokens", "segments")}


def make(folder: str, mib: int) -> Manifest:
    """Writes random rows of three documents each."""
    rng = np.random.default_rng(0)
    size = len(example_proto.encode(_row(rng), FEATURES)) + tfrecord.OVERHEAD
    rows = max(BATCH, min(mib << 20, SHARD) // size // BATCH * BATCH)
    shards = [
        tfrecord.write(
            os.path.join(folder, f"train-{number:05d}.tfrecord"),
            (example_proto.encode(_row(rng), FEATURES) for _ in range(rows)),
        )
        for number in range(max(1, (mib << 20) // (rows * size)))
    ]
    data = Manifest(folder, FEATURES, {"train": tuple(shards)})
    manifest.write(data)
    return data


def _row(rng: np.random.Generator) -> dict:
    ends = np.sort(rng.integers(1, CONTEXT, 2))
    segments = np.searchsorted(ends, np.arange(CONTEXT + 1), side="right") + 1
    return {"tokens": rng.integers(0, 50_257, CONTEXT + 1), "segments": segments}


def seconds(batches: tf.data.Dataset, steps: int) -> float:
    """Returns the time of `steps` batches, after one to warm up."""
    iterator = iter(batches)
    next(iterator)
    start = time.perf_counter()
    for _ in range(steps):
        next(iterator)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--turns", type=int, default=11)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = make(folder, flags.mib)
        shards = data.list_shards("train")
        megabytes = sum(shard.bytes for shard in shards) / 1e6
        steps = data.count_examples("train") // BATCH - 1
        megabytes *= steps * BATCH / data.count_examples("train")
        paths = [data.build_path(shard) for shard in shards]
        pipeline = input_pipelines.training(
            Tokens(data_dir=folder, context=CONTEXT, global_batch_size=BATCH, shuffle=2048)
        )
        reader = tf.data.TFRecordDataset(paths).batch(BATCH).prefetch(tf.data.AUTOTUNE)
        contestants = {
            "pipeline": pipeline.starting_at(0).prefetch(tf.data.AUTOTUNE),
            "TFRecordDataset": reader,
            "TFRecordDataset, record by record": tf.data.TFRecordDataset(paths),
        }
        counts = dict.fromkeys(contestants, steps)
        counts["TFRecordDataset, record by record"] *= BATCH
        rates = {name: [] for name in contestants}
        for turn in range(flags.turns + 1):
            for name, batches in contestants.items():
                rate = megabytes / seconds(batches, counts[name])
                if turn:  # the first fills the page cache
                    rates[name].append(rate)
    print(
        f"{megabytes:,.0f} MB in {len(shards)} shards, {BATCH} rows a batch, {os.cpu_count()} cores"
    )
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(rates["pipeline"], values))
        median = statistics.median(values)
        print(f"  {name:36}{median:8,.0f} MB/s   pipeline / it: {ratio:.2f}")


if __name__ == "__main__":
    main()
