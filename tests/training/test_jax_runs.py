"""Runs of a trainer on the JAX engine: resumed, on another mesh, on the other engine."""

import numpy as np
import pytest

import tftpu
from tests.support.models import zoo
from tests.support.models.strategies import relative
from tests.support.programs import jax_process, jax_runs
from tests.support.programs.jax_runs import HALF, STEPS
from tftpu import models
from tftpu.storage import safetensors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of the runs, and what they found."""
    folder = tmp_path_factory.mktemp("runs")
    jax_runs.fitted(jax_runs.trainer_of(None, folder / jax_runs.BEGUN), HALF)
    saved = zoo.build("llama", width=64, hidden=128)
    models.save_weights(saved, str(folder / jax_runs.WEIGHTS))
    jax_process.output("programs.jax_runs", str(folder))
    return folder, dict(np.load(folder / "results.npz"))


def weights(found, name: str) -> list[np.ndarray]:
    return [found[f"{name} {i}"] for i in range(8)]  # four weights and their averages


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(run):
    for straight, resumed in zip(weights(run[1], "straight"), weights(run[1], "same mesh")):
        np.testing.assert_array_equal(straight, resumed)


def test_a_run_resumes_on_another_mesh(run):
    for straight, resumed in zip(weights(run[1], "straight"), weights(run[1], "other mesh")):
        assert relative(resumed, straight) < 1e-5


def test_a_run_begun_on_jax_ends_on_tensorflow(run):
    folder, found = run
    resumed = jax_runs.fitted(jax_runs.trainer_of(None, folder / "shared"), STEPS)
    assert resumed.step == STEPS
    for straight, value in zip(weights(found, "straight"), jax_runs.weights_of(resumed)):
        assert relative(value, straight) < 1e-5


def test_a_run_begun_on_tensorflow_ends_on_jax(run):
    found = run[1]
    for straight, value in zip(weights(found, "straight"), weights(found, jax_runs.BEGUN)):
        assert relative(value, straight) < 1e-5


def test_weights_are_loaded_by_the_parts_that_devices_hold(run):
    folder, found = run
    assert found["largest read"] == found["largest held"] == 0.25
    model = zoo.build("llama", width=64, hidden=128)
    models.load_weights(model, str(folder / jax_runs.WEIGHTS))
    for variable in model.weights:
        np.testing.assert_array_equal(found[f"loaded {variable.path}"], variable.numpy())


def test_a_checkpoint_holds_the_parts_of_the_devices(run):
    file = run[0] / "shared" / "checkpoints" / str(HALF) / "optimizer.safetensors"
    arrays = safetensors.decode(file.read_bytes())
    cut = [name for name in arrays if "first_kernel" in name]
    assert [name.split(" ", 2)[2] for name in cut] == [
        f"[0:6, {first}:{first + 256}] of [6, 1024]" for first in range(0, 1024, 256)
    ]
    assert arrays[cut[0]].shape == (6, 256)


def test_evaluation_and_prediction_are_those_of_keras(run):
    found = run[1]
    np.testing.assert_allclose(
        found["predicted"], found["predicted by Keras"], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(found["evaluated"], found["evaluated by Keras"], rtol=1e-6)


def test_engines_of_several_sizes_predict_in_one_process(run):
    found = run[1]
    np.testing.assert_allclose(found["predicted on 4"], found["predicted on 1"], atol=1e-5)


def test_no_device_holds_a_whole_variable_at_its_creation_and_the_values_are_the_same(run):
    found = run[1]
    assert found["held on data:4"] == 1
    for mesh in ("fsdp:4", "fsdp:2,tensor:2"):
        assert found[f"held on {mesh}"] == 1 / 4
        np.testing.assert_array_equal(found[f"created on {mesh}"], found["created on data:4"])


def test_optimizers_are_cut_at_their_creation_even_for_a_model_that_is_built_late(run):
    assert run[1]["slots held"] == 1 / 4


def test_a_model_begins_with_the_weights_of_the_other_engine(run):
    weights = jax_runs.begun(tftpu.connect("none", virtual_devices=1))
    assert len(weights) == 10
    for index, value in enumerate(weights):
        found = run[1][f"begun {index}"]
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6)  # one is a QR


def test_the_values_of_a_loss_function_keep_their_names(run):
    np.testing.assert_array_equal(run[1]["named"], [[1.0], [2.0]])


def test_masks_reach_the_loss_as_on_tensorflow(run):
    expected = jax_runs.masked(tftpu.connect("none", virtual_devices=1))
    np.testing.assert_allclose(run[1]["masked"], expected, rtol=1e-5)


def test_epochs_end_with_their_smaller_batch_as_on_tensorflow(run):
    x, y = jax_runs.data()
    trainer = jax_runs.trainer_of(None, None)
    history = trainer.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    np.testing.assert_allclose(run[1]["epochs"], history.history["loss"], rtol=1e-5)


@pytest.mark.parametrize("generated", [False, True])
def test_what_a_callback_changes_in_the_data_is_in_the_next_epoch_as_in_keras(run, generated):
    ours, keras = run[1][f"changed, generated: {generated}"]
    np.testing.assert_allclose(ours, keras, rtol=1e-5)


def test_what_cannot_be_trained_is_refused(run):
    no_rules, no_sum, uneven = run[1]["refusals"]
    assert "the Sequential 'mlp' has no sharding_rules" in no_rules
    assert "'largest/state' of a metric is not a sum over examples" in no_sum
    assert "A batch holds 8 examples, but each batch of an epoch must hold 16" in uneven


def test_batches_that_devices_cannot_share_equally_train_as_on_one_device(run):
    one, four = (run[1][f"odd on {devices}"] for devices in ("one device", "four devices"))
    np.testing.assert_allclose(four, one, rtol=1e-5)


def test_an_example_draws_the_same_on_any_mesh_and_in_any_microbatch(run):
    one, four = (run[1][f"depth on {devices}"] for devices in ("one device", "four devices"))
    np.testing.assert_allclose(four, one, rtol=1e-5)
