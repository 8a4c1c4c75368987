"""Writers of a run's metrics: TensorBoard, metrics.jsonl, the console; and profiles."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

import tftpu
from tests.support.models.training import compiled, data, make_trainer
from tftpu.config import profile_plan
from tftpu.errors import UserError
from tftpu.observe import console as consoles
from tftpu.observe import samples, services, writers
from tftpu.runtime.goodput import Clock


@pytest.mark.slow
def test_tensorboard_gets_every_scalar_and_the_learning_rate_curve(tmp_path):
    rates = keras.optimizers.schedules.PolynomialDecay(0.1, 40, 0.02)
    trainer = make_trainer(compiled(optimizer=keras.optimizers.SGD(rates)), tmp_path, log_every=10)
    trainer.fit(data(), steps=40, validation_data=data(), eval_every=20)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    for split in ("train", "eval"):
        events = EventAccumulator(str(tmp_path / split), size_guidance={"tensors": 0}).Reload()
        tags = set(events.Tags()["tensors"])
        assert {"loss", "accuracy"} <= tags
        steps = [event.step for event in events.Tensors("loss")]
        assert steps == [line["step"] for line in lines if line["split"] == split]
    curve = [line["learning_rate"] for line in lines if line["split"] == "train"]
    assert curve == pytest.approx([0.08, 0.06, 0.04, 0.02])


@pytest.mark.medium
def test_a_profile_of_a_window_of_steps_is_written_and_readable(tmp_path):
    from xprof.convert import raw_to_tool_data

    trainer = make_trainer(compiled(), tmp_path, profile="10:14")
    trainer.fit(data(), steps=30)
    (trace,) = tmp_path.rglob("*.xplane.pb")
    stats, _ = raw_to_tool_data.xspace_to_tool_data([str(trace)], "framework_op_stats", {})
    assert b"MatMul" in stats
    assert trainer.account.clock.sum_seconds()["profiling"] > 0


def test_a_profile_plan_is_windows_of_steps_and_slow_loops():
    assert profile_plan("") == ((), False)
    assert profile_plan("100:110") == (((100, 110),), False)
    assert profile_plan("100:110,slow,500:520") == (((100, 110), (500, 520)), True)
    for wrong in ("100", "110:100", "a:b", "5:5", "fast"):
        with pytest.raises(UserError, match="FIRST:LAST"):
            profile_plan(wrong)


def test_without_a_terminal_the_console_prints_plain_lines(capsys):
    console = consoles.Console(100)
    console.write(50, "train", {"loss": 0.123456, "grad_norm": 1.0, "examples_per_sec": 12345.6})
    console.write(100, "eval", {"loss": 2.0})
    console.close()
    assert capsys.readouterr().out.splitlines() == [
        "train step 50/100  loss 0.1235  examples_per_sec 12,346",
        "eval  step 100/100  loss 2",
    ]


def test_throughput_counts_only_steps():
    clock = Clock()
    clock.count(100, 2.0)
    assert clock.compute_rate() == 50.0
    assert clock.compute_window_rate() == 50.0
    clock.count(10, 1.0)
    assert clock.compute_window_rate() == 10.0
    assert clock.compute_rate() == pytest.approx(110 / 3)


def events(folder) -> EventAccumulator:
    sizes = {"tensors": 0, "images": 0}
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


@pytest.mark.slow
def test_the_weight_norm_is_that_of_the_weights_on_one_replica_and_on_four(tmp_path):
    norms = []
    for replicas in (1, 4):
        with tftpu.connect(virtual_devices=replicas).scope():
            model = compiled()
        workdir = tmp_path / str(replicas)
        make_trainer(model, workdir, log_every=6).fit(data(), steps=12)
        last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
        flat = np.concatenate([w.ravel() for w in model.get_weights()])
        assert last["weight_norm"] == pytest.approx(np.linalg.norm(flat), rel=1e-6)
        norms.append(last["weight_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.medium
def test_goodput_and_the_machine_have_curves_but_no_metric_lines(tmp_path):
    trainer = make_trainer(compiled(), tmp_path, log_every=10)
    trainer.fit(data(), steps=30)
    tags = events(tmp_path / "train").Tags()["tensors"]
    assert {"goodput/step", "goodput/compiling", "goodput/restart"} <= set(tags)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert not any(name.startswith("goodput") for line in lines for name in line)


@pytest.mark.medium
def test_the_log_holds_the_lines_printed_without_a_terminal(tmp_path, capsys):
    trainer = make_trainer(compiled(), tmp_path, log_every=10)
    trainer.fit(data(), steps=30, validation_data=data())
    compiling, *said = capsys.readouterr().out.splitlines()
    assert compiling == "Compiling the train step ..."  # the log has the metrics alone
    logged = (tmp_path / "train.log").read_text().splitlines()
    dated = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)")
    assert [dated.fullmatch(line)[1] for line in logged] == [
        line.partition("  ETA")[0] for line in said
    ]


def hyperparameters(folder) -> dict[str, Any]:
    """Returns the settings of a folder in the HParams tab, in the order of its columns."""
    found: dict[str, Any] = {}
    for path in folder.glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                data = value.metadata.plugin_data
                if data.plugin_name == "hparams":
                    session = metadata.parse_session_start_info_plugin_data(data.content)
                    found = {name: session.hparams[name] for name in sorted(session.hparams)}
    return found


@pytest.mark.medium
@pytest.mark.parametrize("evaluated", [True, False])
def test_tensorboard_lists_no_run_but_those_of_the_splits(evaluated, tmp_path):
    config = {"data.name": "ones", "train.seed": 3}
    trainer = make_trainer(compiled(), tmp_path, log_every=10, hyperparameters=config)
    trainer.fit(data(), steps=20, validation_data=data() if evaluated else None)
    runs = {path.parent.relative_to(tmp_path).name for path in tmp_path.rglob("events*")}
    assert runs == ({"train", "eval"} if evaluated else {"train"})
    shown = hyperparameters(tmp_path / ("eval" if evaluated else "train"))
    assert list(shown)[:3] == ["Global batch size", "Learning rate", "Model"]
    assert shown["Learning rate"].number_value == pytest.approx(0.01)
    assert {"data.name", "train.seed"} <= set(shown)


@pytest.mark.medium
def test_images_of_the_evaluation_are_shown_with_label_and_prediction(tmp_path):
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(4)]
    model = compiled(keras.Sequential(layers))
    x = np.random.default_rng(0).uniform(size=(40, 8, 8, 1)).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, np.arange(40) % 4)).batch(10)
    trainer = make_trainer(model, tmp_path)
    trainer.fit(batches, steps=8, validation_data=batches, eval_every=4)
    found = events(tmp_path / "eval").Tensors("samples")
    assert [event.step for event in found] == [4, 8]
    width, height, *pictures = found[-1].tensor_proto.string_val
    assert (width, height, len(pictures)) == (b"96", b"122", samples.COUNT)
    shown = tf.io.decode_png(pictures[3]).numpy()[:96, :96, 0]
    # The fourth example, each pixel as a square of 12 x 12.
    grey = (x[3, ..., 0] - x[:8].min()) / (x[:8].max() - x[:8].min()) * 255
    np.testing.assert_allclose(shown[6::12, 6::12], grey, atol=1.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([3, 1]), [3, 1]),
        (np.array([[3], [1]]), [3, 1]),
        (np.array([[0.1, 0.9], [0.8, 0.2]]), [1, 0]),
        (np.array([0.5, 0.1]), None),
        ({"kind": np.array([1])}, None),
    ],
)
def test_a_class_is_read_from_labels_and_from_outputs(values, expected):
    found = samples.find_classes(values)
    assert expected is None if found is None else found.tolist() == expected


def test_a_wrong_prediction_is_red():
    x = np.zeros((2, 8, 8, 1))
    right, wrong = samples.draw_captions(x, np.array([0, 1]), np.array([[1.0, 0.0], [1.0, 0.0]]))
    red = [picture[96:, :, 0].astype(int) - picture[96:, :, 1] for picture in (right, wrong)]
    assert red[0].max() <= 0 < 100 < red[1].max()


@pytest.mark.medium
def test_a_users_own_writer_receives_everything(tmp_path):
    class Own(writers.Writer):
        def __init__(self):
            self.calls = []

        def begin(self, config):
            self.calls.append(("begin", config["optimizer"], config["mine"]))

        def write(self, step, split, scalars):
            self.calls.append((split, step))

        def write_text(self, step, name, text):
            self.calls.append((name, step))

        def close(self):
            self.calls.append("close")

    own = Own()
    trainer = make_trainer(
        compiled(),
        tmp_path,
        writers=[own],
        hyperparameters={"mine": 3},
        sample=lambda trainer: "what it can do",
        log_every=10,
    )
    trainer.fit(data(), steps=10, validation_data=data())
    expected = [("begin", "SGD", 3), ("model", 0), ("train", 10), ("host", 10), ("eval", 10)]
    assert own.calls == [*expected, ("sample", 10), "close"]


def test_a_missing_writer_fails_with_a_clear_error(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="'wandb'"):
        make_trainer(compiled(), tmp_path, writers=("wand",))
    monkeypatch.setitem(sys.modules, "mlflow", None)  # what an import of it then raises
    trainer = make_trainer(compiled(), tmp_path, writers=("mlflow",))
    with pytest.raises(UserError, match="pip install mlflow-skinny"):
        trainer.fit(data(), steps=1)


@pytest.mark.medium
def test_a_writer_that_fails_with_a_declared_error_does_not_end_the_run(tmp_path, caplog):
    class Away(writers.Writer):
        failures = (ConnectionResetError, LookupError)

        def write(self, step, split, scalars):
            raise LookupError("the server is away")

    trainer = make_trainer(compiled(), tmp_path, writers=[Away()], log_every=5)
    trainer.fit(data(), steps=10)
    assert caplog.text.count("Away cannot write (the server is away)") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_an_unreachable_server_of_metrics_fails_at_the_start_and_warns_later(
    tmp_path, monkeypatch, caplog
):
    import mlflow

    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"'mlflow' cannot start: .*Set MLFLOW_TRACKING_URI"):
        services.MLflow(str(tmp_path))
    assert time.monotonic() - began < 30  # not the minutes that MLflow would try
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    sink = writers.Writers([services.MLflow(str(tmp_path))])
    for run in (tmp_path / "store").glob("*/*/meta.yaml"):
        shutil.rmtree(run.parent)
    sink.write(1, "train", {"loss": 1.0})
    assert "MLflow cannot write" in caplog.text


@pytest.mark.parametrize("message", ["", " \n"])
def test_an_error_of_a_service_without_a_message_is_named_by_its_type(message):
    with (
        pytest.raises(UserError, match=r"'mlflow' cannot start: LookupError\. Set THAT, or"),
        services._explain_errors("mlflow", "THAT", (LookupError,)),
    ):
        raise LookupError(message)


@pytest.mark.slow
def test_weights_and_biases_without_a_key_fails_with_a_clear_error(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    code = "import sys; from tftpu.observe import services; services.WandB(sys.argv[1])"
    done = subprocess.run(  # in a separate process: the package remembers its configuration
        [sys.executable, "-c", code, str(tmp_path)],
        env={**environment, "NETRC": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert "UserError: The writer 'wandb' cannot start:" in done.stderr
    assert "Set WANDB_API_KEY, or WANDB_MODE=offline" in done.stderr


def fit_with(name: str, workdir, steps: int) -> None:
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(4)]
    x = np.zeros((32, 8, 8, 1), np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, np.arange(32) % 4)).batch(16)
    trainer = make_trainer(
        compiled(keras.Sequential(layers)),
        workdir,
        writers=(name,),
        hyperparameters={"data.name": "zeros"},
        log_every=5,
    )
    trainer.fit(batches, steps=steps, validation_data=batches)


@pytest.mark.slow
def test_mlflow_holds_the_run_and_resumes_it(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    fit_with("mlflow", tmp_path / "run", 10)
    fit_with("mlflow", tmp_path / "run", 20)  # resumed
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tftpu")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["data.name"] == "zeros"
    curve = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in curve] == [5, 10, 15, 20]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert [point.value for point in curve] == pytest.approx(losses)
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"model", "samples"} <= names


@pytest.mark.slow
def test_weights_and_biases_holds_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    fit_with("wandb", tmp_path, 10)
    (path,) = tmp_path.rglob("*.wandb")  # its log: protocol buffers end to end
    written = path.read_bytes()
    for name in (b"train/loss", b"eval/accuracy", b"goodput/step", b"data.name"):
        assert name in written
    assert list(tmp_path.rglob("media/images/samples*.png"))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines_that_are_written(tmp_path):
    # A leak grows in every window; what other threads of the tests allocate, in some.
    process, tensorboard = psutil.Process(), writers.TensorBoard(str(tmp_path))
    held = []
    for step in range(1400):
        scalars = {f"metric_{n}": 1.0 / (1 + n + 10 * step) for n in range(10)}
        tensorboard.write(step, "train", scalars)
        if step % 400 == 199:
            held.append(process.memory_info().rss / 2**20)
    assert min(later - earlier for earlier, later in itertools.pairwise(held)) < 1, held


def test_hyperparameters_are_written_where_tf_keras_cannot_be_imported(tmp_path, monkeypatch):
    # As TF_USE_LEGACY_KERAS=1 makes it without Keras 2: any use of the name fails.
    monkeypatch.setattr(tf, "keras", None)
    for name in [name for name in sys.modules if name.startswith("tensorboard.plugins.hparams.")]:
        monkeypatch.delitem(sys.modules, name)
    writer = writers.TensorBoard(str(tmp_path))
    writer.begin({"train.seed": 3})
    writer.close()
    assert hyperparameters(tmp_path / "train")["train.seed"].number_value == 3
