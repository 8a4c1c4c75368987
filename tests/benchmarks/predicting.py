"""Times predictions that are written to shards, beside Keras's `predict`, which keeps them.

    python -m tests.benchmarks.predicting [--turns=11] [--records=40000]

The model is that of the config digits_resnet, with random weights; the images are in memory, so
that what is compared is the forward pass, and what is done with its outputs. All take turns, in an
order that is drawn anew for each, and Keras's `predict` has one before and one after each of them,
as the speed of a machine changes from minute to minute. What TensorFlow and Keras loaded is not
collected: a collection takes 0.6 s, at a moment that is chance. Prints medians of the records per
second, medians of the ratios to the two turns of Keras's `predict`, and the ratio of the fastest
turns.

Evidence: executed, on this machine's CPU.
"""

import argparse
import gc
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import tftpu
from tftpu import models
from tftpu.config import DataContext
from tftpu.inference.predict import Job, predict
from tftpu.inference.prediction.outputs import build_columns
from tftpu.input_pipelines import unlabelled
from tftpu.input_pipelines.formats import results
from tftpu.launch.settings.config_flags import load

BATCH = 256
FORMATS = {"jsonl": results.jsonl, "tfrecord": results.tfrecord, "parquet": results.parquet}


def main() -> None:
    """Prints the records per second of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--records", type=int, default=40_000)
    given = parser.parse_args()
    images = np.random.default_rng(0).normal(size=(given.records, 8, 8, 1)).astype(np.float32)
    with tftpu.connect("none").scope():
        model = models.build(load("digits_resnet", []).model)
        model.compile("sgd", "mse")
    trainer = tftpu.Trainer(model)
    records = unlabelled.from_arrays(images, DataContext(0, BATCH), "images")
    ways: dict[str, Any] = {
        "Trainer": lambda: trainer.predict(images, BATCH),
        **{form: lambda form=form: _written(trainer, records, form) for form in FORMATS},
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    keras: dict[str, list[float]] = {name: [] for name in ways}  # the mean of before and after
    for turn in range(given.turns + 1):  # the first compiles
        before = _seconds(lambda: model.predict(images, BATCH, verbose=0))
        for name, way in random.sample(list(ways.items()), len(ways)):
            seconds = _seconds(way)
            after = _seconds(lambda: model.predict(images, BATCH, verbose=0))
            if turn:
                spent[name].append(seconds)
                keras[name].append((before + after) / 2)
            before = after
        gc.collect()
        gc.freeze()
    known = [seconds for each in keras.values() for seconds in each]
    print(f"{'Keras':10}{given.records / statistics.median(known):10,.0f}/s")
    for name, seconds in spent.items():
        ratio = statistics.median(k / s for k, s in zip(keras[name], seconds))
        best = min(known) / min(seconds)
        rate = given.records / statistics.median(seconds)
        print(f"{name:10}{rate:10,.0f}/s  {ratio:6.2f}  {best:6.2f}")


def _seconds(way: Callable[[], Any]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def _written(trainer: tftpu.Trainer, records: Any, form: str) -> None:
    folder = tempfile.mkdtemp()
    try:
        columns = build_columns(["logits"], False, None)
        predict(trainer, records, Job(folder, form, FORMATS[form], columns, {}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
