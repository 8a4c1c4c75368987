"""Times predictions that are written to shards, beside Keras's `predict`, which keeps them.

    python -m tests.benchmarks.predicting [--turns=11] [--records=40000]

The model is that of the config digits_resnet, with random weights; the images are in memory, so
that what is compared is the forward pass, and what is done with its outputs. All take turns, in an
order that is drawn anew for each. Prints medians of the records per second and of the ratios to
Keras's `predict` in the same turn, and the ratio of the fastest turns.

Evidence: executed, on this machine's CPU.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import tftpu
from tftpu import models
from tftpu.config import DataContext
from tftpu.inference.predict import Job, predict
from tftpu.inference.prediction.outputs import columns_of
from tftpu.input_pipelines import unlabelled
from tftpu.input_pipelines.formats import results
from tftpu.launch.config_flags import load

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
    records = unlabelled.of_arrays(images, DataContext(0, BATCH), "images")
    ways: dict[str, Any] = {
        "Keras": lambda: model.predict(images, BATCH, verbose=0),
        "Trainer": lambda: trainer.predict(images, BATCH),
        **{form: lambda form=form: _written(trainer, records, form) for form in FORMATS},
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(given.turns + 1):  # the first compiles
        for name, way in random.sample(list(ways.items()), len(ways)):
            start = time.perf_counter()
            way()
            if turn:
                spent[name].append(time.perf_counter() - start)
    for name, seconds in spent.items():
        ratio = statistics.median(k / s for k, s in zip(spent["Keras"], seconds))
        best = min(spent["Keras"]) / min(seconds)
        rate = given.records / statistics.median(seconds)
        print(f"{name:10}{rate:10,.0f}/s  {ratio:6.2f}  {best:6.2f}")


def _written(trainer: tftpu.Trainer, records: Any, form: str) -> None:
    folder = tempfile.mkdtemp()
    try:
        columns = columns_of(["logits"], False, None)
        predict(trainer, records, Job(folder, form, FORMATS[form], columns, {}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
