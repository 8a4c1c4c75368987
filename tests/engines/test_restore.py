"""A checkpoint loads on other hardware and in another precision, but not into another model."""

import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp, random_batches, relative
from tests.support.models.training import make_trainer
from tftpu.errors import UserError
from tftpu.input_pipelines.reading.epochs import ArrayPipeline

HALF, STEPS = 10, 20


def trainer(workdir, replicas: int = 1, policy: str = "float32", optimizer=None, model=None):
    keras.config.set_dtype_policy(policy)
    with tftpu.connect(virtual_devices=replicas).scope():
        model = model() if model else mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer or keras.optimizers.AdamW(0.01), loss)
    options = {"steps_per_loop": 5, "log_every": 5, "ema_momentum": 0.9}
    return make_trainer(model, workdir, **options)


def fit(trainer: tftpu.Trainer, steps: int) -> tftpu.Trainer:
    x, y, _ = random_batches(1, 64, False)[0]
    data = ArrayPipeline(
        examples=(x, y), global_batch_size=16, seed=4, prepare=lambda batch, seeds: batch
    )
    trainer.fit(data, steps=steps)
    return trainer


def weights(trainer: tftpu.Trainer) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in trainer.model.trainable_variables])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return weights(fit(trainer(tmp_path_factory.mktemp("whole")), STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 8), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_on_another_number_of_replicas_the_run_is_the_same(before, after, whole, tmp_path):
    fit(trainer(tmp_path, before), HALF)
    again = fit(trainer(tmp_path, after), STEPS)
    assert again.step == STEPS
    assert relative(weights(again), whole) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("float32", "mixed_bfloat16"),
        ("mixed_bfloat16", "float32"),
        ("float32", "mixed_float16"),
        ("mixed_float16", "mixed_bfloat16"),
    ],
)
def test_a_run_resumes_in_another_precision(before, after, whole, tmp_path):
    first = fit(trainer(tmp_path, policy=before), HALF)
    again = trainer(tmp_path, policy=after)
    fit(again, HALF)  # has its steps already: only loads
    assert (weights(again) == weights(first)).all()
    slots = [v.numpy() for v in again.executor.variables.groups[0].optimizer.variables]
    assert all(
        (a == b.numpy()).all()
        for a, b in zip(slots, first.executor.variables.groups[0].optimizer.variables, strict=True)
    )
    fit(again, STEPS)
    assert relative(weights(again), whole) < 0.05


@pytest.mark.medium
def test_another_optimizer_fails_with_a_list_of_the_variables(tmp_path):
    fit(trainer(tmp_path), HALF)
    other = trainer(tmp_path, optimizer=keras.optimizers.SGD(0.01, momentum=0.9))
    before = weights(other)
    with pytest.raises(UserError) as caught:
        fit(other, STEPS)
    said = str(caught.value)
    assert "belongs to another optimizer" in said
    assert "kernel_momentum" in said
    assert "is only in the checkpoint" in said
    assert (weights(other) == before).all()


@pytest.mark.medium
def test_optimizers_with_slots_of_the_same_shapes_are_distinguished(tmp_path):
    """By shape, the momentum of SGD could be mistaken for the velocity of RMSprop."""
    fit(trainer(tmp_path, optimizer=keras.optimizers.SGD(0.01, momentum=0.9)), HALF)
    with pytest.raises(UserError, match="belongs to another optimizer: rm_sprop"):
        fit(trainer(tmp_path, optimizer=keras.optimizers.RMSprop(0.01)), STEPS)


@pytest.mark.medium
def test_another_model_fails_with_a_list_of_only_the_differences(tmp_path):
    def deeper():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="tanh", name="first"),
                keras.layers.Dense(16, name="extra"),
                keras.layers.Dense(4, name="last", dtype="float32"),
            ]
        )

    def plain():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="tanh", name="first"),
                keras.layers.Dense(4, name="last", dtype="float32"),
            ]
        )

    fit(trainer(tmp_path, model=plain), HALF)
    with pytest.raises(UserError) as caught:
        fit(trainer(tmp_path, model=deeper), STEPS)
    said = str(caught.value)
    assert said.count("is not in the checkpoint") == 2
    assert said.count("/extra/") == 2
    assert "first" not in said
    assert "last" not in said


@pytest.mark.medium
def test_layers_without_names_are_compared_in_their_order(tmp_path):
    def build(*sizes):
        layers = [keras.layers.Dense(size) for size in sizes]
        last = keras.layers.Dense(4, name="last", dtype="float32")
        return keras.Sequential([keras.Input((6,)), *layers, last])

    fit(trainer(tmp_path, model=lambda: build(16, 32, 64)), HALF)
    with pytest.raises(UserError) as caught:
        fit(trainer(tmp_path, model=lambda: build(16, 48, 64)), STEPS)
    said = str(caught.value)
    assert "is (16, 48), saved as (16, 32)" in said
    assert "is (48, 64), saved as (32, 64)" in said
    assert "is not in the checkpoint" not in said


@pytest.mark.medium
def test_the_host_state_has_everything_a_run_needs(tmp_path):
    import json

    fit(trainer(tmp_path), HALF)
    state = json.loads((tmp_path / f"checkpoints/{HALF}/state.json").read_text())
    assert {"seed": 0, "position": HALF, "config": None}.items() <= state.items()


@pytest.mark.medium
@pytest.mark.parametrize("name", ["mine.weights.h5", "mine.safetensors"])
def test_only_the_weights_are_exported_with_the_averages_in_place(name, tmp_path):
    trained = fit(trainer(tmp_path / "run"), HALF)
    before = weights(trained)
    trained.export_weights(tmp_path / name)
    assert (weights(trained) == before).all()
    averages = [v.numpy() for v in trained.executor.variables.averages]
    if name.endswith(".h5"):
        other = mlp()
        other.load_weights(tmp_path / name)
        values = [v.numpy() for v in other.trainable_variables]
    else:
        arrays = safetensors.numpy.load_file(tmp_path / name)  # the package itself
        values = [arrays[v.path] for v in trained.model.trainable_variables]
    for value, average in zip(values, averages, strict=True):
        assert (value == average).all()


@pytest.mark.medium
def test_the_files_are_those_of_the_safetensors_package(tmp_path):
    fit(trainer(tmp_path), HALF)
    path = tmp_path / f"checkpoints/{HALF}/model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    assert len(arrays) == 4
    assert safetensors.numpy.load(safetensors.numpy.save(arrays)).keys() == arrays.keys()
    assert tf.io.gfile.exists(str(path))
