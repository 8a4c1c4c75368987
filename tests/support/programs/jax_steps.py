"""Trains models on the JAX engine, for `tests/engines/jax/test_engine.py`.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_steps CASES WEIGHTS.npz RESULTS.npz

CASES is a JSON list of `Case`s. WEIGHTS holds the initial weights of each model, as "MODEL NUMBER".
The results of a case are "NUMBER KIND", where KIND is losses, metrics, evaluation, weights/PATH,
averages/PATH or cut/PATH: the part of a variable that one device holds.
"""

import json
import sys
from typing import Any

import numpy as np

from tests.support.models.strategies import dataset
from tests.support.steps import step_cases
from tests.support.steps.step_cases import Case
from tftpu.config import TrainConfig
from tftpu.engines.jax import cluster


def main(cases: list[Case], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the results of all cases."""
    results: dict[str, Any] = {}
    cluster.connect("none", 8, None)  # JAX keeps the number of devices that it begins with
    for number, case in enumerate(cases):
        for kind, value in _trained(case, weights).items():
            results[f"{number} {kind}"] = value
    return results


def _trained(case: Case, weights: dict[str, np.ndarray]) -> dict[str, Any]:
    engine = cluster.connect("none", step_cases.devices_of(case), case.mesh)
    with engine.scope():
        model = step_cases.model_of(case)
    for index, variable in enumerate(model.weights):
        if f"{case.model} {index}" in weights:
            variable.assign(weights[f"{case.model} {index}"])
    batches = step_cases.batches_of(case)
    data = dataset(batches)
    options = TrainConfig(
        gradient_accumulation_steps=case.gradient_accumulation_steps,
        global_clipnorm=case.global_clipnorm,
        ema_momentum=case.ema_momentum,
    )
    spec = engine.training_spec(data, case.gradient_accumulation_steps)
    executor = engine.prepare(model, options, spec)
    loop = executor.training(spec)
    fed = engine.batches(data, 0)
    layout, sums = executor.train_sums, [loop.run(fed, 1).sums for _ in batches]
    found = [layout.read(one) | layout.read_gradients(one) for one in sums]
    results: dict[str, Any] = {"losses": [result["loss"] for result in found]}
    results["metrics"] = [result.get("accuracy", 0.0) for result in found]
    results["evaluation"] = executor.eval_sums.read(executor.evaluate(data))["loss"]
    for variable in model.weights:
        results[f"weights/{variable.path}"] = np.asarray(variable.value)
        shard = variable.value.sharding.shard_shape(tuple(variable.shape))
        results[f"cut/{variable.path}"] = np.prod(shard) / np.prod(variable.shape)
    for path, value in executor.averaged_weights().items():
        results[f"averages/{path}"] = value
    return results


if __name__ == "__main__":
    given = [Case(**case) for case in json.loads(sys.argv[1])]
    np.savez(sys.argv[3], **main(given, dict(np.load(sys.argv[2]))))
