"""Prints, step by step, how far a run on one device and the same run on several are apart.

    python -m tests.benchmarks.same_numbers [--config=digits_resnet] [--devices=8] [--steps=120]

The devices are virtual ones of the CPU. Loss, gradient norm and weights are compared after every
step; further flags are overrides of the config, as `--config.optimizer.learning_rate=0.01`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

import tftpu
from tftpu.config import Experiment
from tftpu.launch.run import experiment as build
from tftpu.launch.settings import config_flags


class Run(NamedTuple):
    """The logged values and the weights after each step, and the last evaluation."""

    logs: list[dict[str, float]]
    weights: list[np.ndarray]  # all trainable ones in a row
    evaluation: dict[str, float]


class _Record(keras.callbacks.Callback):
    def __init__(self, run: Run):
        super().__init__()
        self._run = run

    def on_train_batch_end(self, batch, logs=None):
        weights = [np.ravel(v) for v in self.model.trainable_variables]
        self._run.weights.append(np.concatenate(weights).astype(np.float64))


def trained(experiment: Experiment, devices: int, steps: int) -> Run:
    """Trains an experiment from its beginning on some virtual devices."""
    engine = tftpu.connect("none", devices)
    experiment = build.resolve_length(experiment)
    run = Run([], [], {})
    with tempfile.TemporaryDirectory() as workdir:
        with engine.scope():
            trainer = build.build_trainer(experiment, workdir)
        data, callbacks = build.build_training_data(experiment), [_Record(run)]
        trainer.fit(data, steps=steps, callbacks=callbacks, verbose=0)
        lines = map(json.loads, (Path(workdir) / "metrics.jsonl").read_text().splitlines())
        run.logs.extend(line for line in lines if line.get("split") == "train")
    evaluation = build.build_evaluation_data(experiment)
    if evaluation is not None:
        run.evaluation.update(trainer.evaluate(evaluation, return_dict=True))
    return run


def apart(one: Run, several: Run) -> list[tuple[float, float, float]]:
    """Returns the relative differences of loss, gradient norm and weights after each step."""
    differences = []
    for a, b, w, v in zip(one.logs, several.logs, one.weights, several.weights):
        loss, norm = (abs(b[key] / a[key] - 1) for key in ("loss", "grad_norm"))
        differences.append((loss, norm, float(np.linalg.norm(v - w) / np.linalg.norm(w))))
    return differences


def main(arguments: list[str] | None = None) -> None:
    """Trains both, and prints a line for every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", default="digits_resnet")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120)
    options, overrides = parser.parse_known_args(arguments)
    experiment = config_flags.load(options.config, overrides)
    experiment.train.steps_per_loop = experiment.train.log_every = 1
    experiment.train.checkpoint_every, experiment.train.best_metric = 0, ""
    # First: the number of virtual devices is set once in a process.
    several = trained(experiment, options.devices, options.steps)
    one = trained(experiment, 1, options.steps)
    print(f"{options.config} on 1 and on {options.devices} devices: relative differences")
    print(f"{'step':>6}{'loss':>10}{'of loss':>11}{'grad norm':>11}{'weights':>11}")
    for step, (logs, differences) in enumerate(zip(one.logs, apart(one, several)), 1):
        print(f"{step:6}{logs['loss']:10.4f}" + "".join(f"{d:11.1e}" for d in differences))
    for name, value in one.evaluation.items():
        print(f"evaluation's {name}: {value:.4f} and {several.evaluation[name]:.4f}")


if __name__ == "__main__":
    main()
