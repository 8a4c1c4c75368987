"""The JAX engine on any mesh: the numbers of plain TensorFlow, and of the TensorFlow engine."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import relative
from tests.support.programs import jax_process
from tests.support.steps import reference, stepping
from tests.support.steps.step_cases import Case, batches_of, model_of

TOLERANCE = {"sgd": 1e-5, "lars": 1e-5, "adamw": 5e-5, "lamb": 5e-5}
MLP = (
    Case(mesh="data:8"),
    Case(mesh="fsdp:8", optimizer="adamw", global_clipnorm=0.1, weighted=True, ema_momentum=0.9),
    Case(mesh="data:2,fsdp:-1", optimizer="lamb", gradient_accumulation_steps=4, weighted=True),
    Case(mesh="fsdp:8", optimizer="lars", gradient_accumulation_steps=2, ema_momentum=0.9),
)
FAMILIES = (
    Case("convnext", "fsdp:8"),
    Case("gpt", "fsdp:4,tensor:2", ema_momentum=0.9, scan="block"),
    Case("gpt", "data:2,sequence:4", gradient_accumulation_steps=2, weighted=True),
    Case("llama", "data:2,fsdp:2,tensor:2", remat="block", global_clipnorm=0.1, scan="block"),
)
OTHERS = (
    Case(
        "resnet", "data:2,fsdp:2", global_clipnorm=1.0, gradient_accumulation_steps=2, weighted=True
    ),
    Case("efficientnetv2", "data:2,fsdp:2,tensor:2"),
    Case("vit", "fsdp:4,tensor:2"),
    Case("bert", "data:2,fsdp:2,tensor:2"),
    Case("gpt", "fsdp:8", gradient_accumulation_steps=2, weighted=True),
    Case("llama", "fsdp:2,sequence:2,tensor:2", scan="block"),
)


def on_jax(cases, folder) -> list[dict[str, np.ndarray]]:
    """Returns the results of cases on the JAX engine, which needs its own process."""
    weights = {}
    for name in {case.model for case in cases}:
        for index, variable in enumerate(model_of(Case(name)).weights):
            weights[f"{name} {index}"] = variable.numpy()
    np.savez(folder / "weights.npz", **weights)
    given = json.dumps([dataclasses.asdict(case) for case in cases])
    files = [str(folder / "weights.npz"), str(folder / "results.npz")]
    jax_process.output("programs.jax_steps", given, *files)
    found: list[dict[str, np.ndarray]] = [{} for _ in cases]
    for name, value in np.load(folder / "results.npz").items():
        number, kind = name.split(" ", 1)
        found[int(number)][kind] = value
    return found


@pytest.fixture(scope="module")
def mlps(tmp_path_factory):
    return dict(zip(MLP, on_jax(MLP, tmp_path_factory.mktemp("mlps"))))


@pytest.mark.medium
@pytest.mark.parametrize("case", MLP, ids=str)
def test_a_step_equals_plain_tensorflow_on_one_device(mlps, case):
    def forward(weights, x):
        return tf.tanh(x @ weights[0] + weights[1]) @ weights[2] + weights[3]

    model = model_of(case)
    wanted = reference.Reference(
        forward, model.get_weights(), case.optimizer, case.global_clipnorm
    ).run(batches_of(case))
    found, tolerance = mlps[case], TOLERANCE[case.optimizer]
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=tolerance)
    np.testing.assert_allclose(found["metrics"], wanted["accuracies"], rtol=tolerance)
    for variable, value, average in zip(model.weights, wanted["weights"], wanted["ema"]):
        assert relative(found[f"weights/{variable.path}"], value) < tolerance
        if case.ema_momentum:
            assert relative(found[f"averages/{variable.path}"], average) < tolerance


def test_fsdp_cuts_what_is_large(mlps):
    paths = [variable.path for variable in model_of(Case()).weights]
    cut = {case.mesh: [float(mlps[case][f"cut/{path}"]) for path in paths] for case in MLP[:3]}
    assert cut == {
        "data:8": [1, 1, 1, 1],
        "fsdp:8": [1 / 8, 1, 1 / 8, 1],
        "data:2,fsdp:-1": [1 / 4, 1, 1 / 4, 1],
    }


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Returns the function that gives the results of a case; one process computes a group."""

    @functools.cache
    def compute(cases):
        return dict(zip(cases, on_jax(cases, tmp_path_factory.mktemp("families"))))

    return lambda case: compute(FAMILIES if case in FAMILIES else OTHERS)[case]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*FAMILIES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in OTHERS)],
    ids=str,
)
def test_every_family_equals_the_tensorflow_engine_on_one_device(families, case):
    engine = tftpu.connect(virtual_devices=1, engine="tensorflow")
    with engine.scope():
        model = model_of(dataclasses.replace(case, scan="none"))
    batches = batches_of(case)
    options = {
        "global_clipnorm": case.global_clipnorm,
        "ema_momentum": case.ema_momentum,
    }
    step = stepping.make_step(engine, model, batches, **options)
    results = stepping.train(engine, step, batches)
    found = families(case)
    np.testing.assert_allclose(found["losses"], [r["loss"] for r in results], rtol=1e-5)
    for variable in model.weights:
        if variable.dtype == "float32":
            found_value = found[f"weights/{variable.path}"]
            # Ghost batches of two examples amplify rounding.
            tolerance = 5e-5 if case.model == "efficientnetv2" else TOLERANCE["sgd"]
            # Shifts that the next normalization takes out again have no gradient but rounding.
            rounding = np.max(np.abs(found_value - variable.numpy())) < 1e-7
            assert rounding or relative(found_value, variable.numpy()) < tolerance, variable.path
