"""Models, data, losses and metrics of a user's own, through the commands of tftpu."""

import json
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support import projects
from tftpu.config import OPTIMIZERS, from_json, to_json
from tftpu.errors import UserError
from tftpu.launch.commands.data import check
from tftpu.launch.main import main
from tftpu.launch.run import experiment
from tftpu.launch.settings import config_flags, keras_objects, own_code
from tftpu.optim import optimizers

SGD = "optimizer=keras.optimizers.SGD(0.05, momentum=0.5)"
OBJECTS = f"""
    {SGD}, loss=losses.Scaled(scale=2.0),
    metrics=("mae", keras.metrics.RootMeanSquaredError(name="rmse")),
    train=tftpu.TrainConfig(epochs=4, steps_per_loop=3),
"""
IMPORTS = "import keras\nimport losses\nimport tftpu"


pytestmark = pytest.mark.usefixtures("in_scratch_project")


def write(tmp_path, rest: str, **files: str) -> str:
    text = projects.CONFIG.format(rest=rest).replace("import tftpu", IMPORTS)
    return str(projects.write(tmp_path, rest, **{"mine": text, **files}))


def fitted(epochs: int) -> tuple[dict[str, float], list[np.ndarray]]:
    """Returns what Keras's own `fit` makes of the same project: its evaluation, its weights."""
    import data
    import losses

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    metrics = ["mae", keras.metrics.RootMeanSquaredError(name="rmse")]
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), losses.Scaled(2.0), metrics=metrics)
    x, y = data.sums(96)
    model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model.evaluate(*data.sums(40, seed=1), return_dict=True, verbose=0), model.get_weights()


@pytest.mark.slow
def test_a_config_of_own_parts_trains_as_keras_does_and_every_step_of_it_is_recorded(
    tmp_path, capsys
):
    path = write(tmp_path, OBJECTS)
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0
    said = capsys.readouterr().out
    assert "tftpu train mine: 4 epochs in steps of 16 examples, in run" in said
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["split"] == "eval"]
    assert [line["step"] for line in evaluations] == [6, 12, 18, 24]  # 96 examples in 16s
    wanted, weights = fitted(4)
    for name, value in wanted.items():
        assert evaluations[-1][name] == pytest.approx(value, rel=1e-5), name

    assert main(["evaluate", "--workdir=run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"step 24  loss {wanted['loss']:.4f}  mae {wanted['mae']:.4f}")
    assert main(["export-weights", "--workdir=run", "--to=w.weights.h5"]) == 0
    exported = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    exported.load_weights("w.weights.h5")
    np.testing.assert_allclose(exported.get_weights()[0], weights[0], rtol=1e-5)

    recorded = json.loads(Path("run/config.json").read_text())
    assert recorded["model"]["class"] == "model.Linear"
    assert recorded["config_file"] == path
    assert (recorded["train"]["steps"], recorded["train"]["epochs"]) == (24, None)
    capsys.readouterr()
    Path(path).write_text(f"{Path(path).read_text()}\nUNUSED = 1\n")
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0  # the same run
    said = capsys.readouterr()
    assert "nothing is left to train" in said.out
    assert "has changed since the run was started: nothing is trained now" in said.err
    other = write(tmp_path, OBJECTS.replace("scale=2.0", "scale=3.0"))
    assert main(["train", f"--config={other}", "--workdir=run"]) == 2
    assert "another loss configuration" in capsys.readouterr().err


def old_names(text: str) -> str:
    """Returns a config.json with the names that the classes of configs had before."""
    return re.sub(r"(tftpu\.config\.\w+\.)(Cluster|Optimizer|Train)Config", r"\1\2", text)


@pytest.mark.slow
def test_a_run_that_holds_old_names_is_evaluated_and_resumes(tmp_path, capsys):
    rest = "loss='mse', optimizer=tftpu.OptimizerConfig(warmup_steps=2), {train}"
    train = "train=tftpu.TrainConfig(steps={}, checkpoint_every=3)"
    path = write(tmp_path, rest.format(train=train.format(6)))
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0
    assert main(["evaluate", "--workdir=run"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    recorded = Path("run/config.json")
    recorded.write_text(old_names(recorded.read_text()))
    assert 'tftpu.config.options.Train"' in recorded.read_text()
    assert main(["evaluate", "--workdir=run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == said
    path = write(tmp_path, rest.format(train=train.format(9)))
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0
    assert "Resuming from the checkpoint of step 6" in capsys.readouterr().out
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 9


@pytest.mark.parametrize(
    "text",
    ["tftpu.Train(steps=5)", "TrainOptions(steps=5)", "tftpu.Optimizer()"],
)
def test_a_config_of_old_names_is_one_message_with_the_new_ones(tmp_path, capsys, text):
    (tmp_path / "mine.py").write_text(f"import tftpu\ndef get_config():\n    return {text}\n")
    if text.startswith("TrainOptions"):
        (tmp_path / "mine.py").write_text("from tftpu import TrainOptions\ndef get_config(): ...\n")
    assert main(["train", "--config=mine.py", "--workdir=run"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and " is now tftpu." in said
    for name in ("ModelConfig", "DataConfig", "OptimizerConfig", "TrainConfig", "ClusterConfig"):
        assert name in said


OBJECTIVES = """
    def objectives(self, model):
        import tftpu
        import keras
        def squares(model, batch, training):
            x, y = batch
            error = model(x, training=training) - y
            return 2.0 * keras.ops.mean(error**2, axis=-1), {"mae": keras.ops.abs(error)[:, 0]}
        return [tftpu.Objective(squares, None, keras.optimizers.SGD(0.05, momentum=0.5))]
"""


@pytest.mark.slow
def test_a_model_brings_loss_functions_of_its_own(tmp_path, capsys):
    rest = "train=tftpu.TrainConfig(epochs=4)"
    path = write(tmp_path, rest, model=projects.MODEL + OBJECTIVES)
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "--workdir=run"]) == 0
    wanted, _ = fitted(4)  # the same loss, as a Keras loss
    said = capsys.readouterr().out
    assert f"loss {wanted['loss']:.4f}" in said and f"mae {wanted['mae']:.4f}" in said
    assert main(["train", f"--config={path}", "--workdir=r2", "--config.loss=mse"]) == 2
    assert "so leave out the experiment's loss" in capsys.readouterr().err


@pytest.mark.slow
def test_callbacks_of_a_config_end_the_run(tmp_path):
    class_ = """
import keras
import losses

class EndsAtOnce(keras.callbacks.Callback):
    def __init__(self, patience=3):
        super().__init__()
        self.patience = patience

    def on_epoch_end(self, epoch, logs):
        assert set(logs) >= {"loss", "val_loss"}
        self.model.stop_training = True
"""
    rest = 'loss="mse", callbacks=[mine_callbacks.EndsAtOnce(2)], train=tftpu.TrainConfig(epochs=9)'
    text = projects.CONFIG.format(rest=rest).replace(
        "import tftpu", "import tftpu\nimport mine_callbacks"
    )
    path = projects.write(tmp_path, rest, mine=text, mine_callbacks=class_)
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 6
    (callback,) = json.loads(Path("run/config.json").read_text())["callbacks"]
    assert callback["description"]["class_name"] == "EndsAtOnce"
    assert callback["description"]["config"] == {"patience": 2}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rest", "flags", "names"),
    [
        ('loss="mse"', [], ["loss"]),
        ('loss="mse", metrics=["mae"]', ["--config.metrics=MeanSquaredError"], None),
        ('loss="binary_crossentropy", metrics=["AUC"], optimizer="adam"', [], ["loss", "AUC"]),
        ('loss=losses.half, metrics=["mae"], optimizer="rmsprop"', [], ["loss", "mae"]),
        ("", ["--config.model.outputs=5"], ["loss", "accuracy"]),
        ("", ["--config.loss=huber", "--config.metrics=mae,R2Score"], ["loss", "mae", "R2Score"]),
    ],
)
def test_losses_and_metrics_by_name_object_and_flag(rest, flags, names, tmp_path):
    path = write(tmp_path, rest)
    settings = config_flags.load(path, ["--config.train.steps=2", *flags])
    code = own_code.find_code(path)
    assert code and from_json(to_json(settings), *own_code.list_modules(code)) == settings
    settings.validate()
    with tftpu.connect().scope():
        trainer = experiment.build_trainer(settings, None)
    positive = tf.data.Dataset.from_tensor_slices((tf.zeros((8, 4)), tf.ones((8, 1)))).batch(8)
    found = trainer.evaluate(positive, return_dict=True)
    assert sorted(found) == sorted(names or ["loss", "MeanSquaredError"])


def test_top_5_of_the_default_loss(tmp_path):
    path = write(tmp_path, "metrics=['sparse_top_k_categorical_accuracy']")
    settings = config_flags.load(path, ["--config.model.outputs=9"])
    model = experiment.build_model(settings)
    assert isinstance(model.loss, experiment.SmoothedCrossentropy)
    x, y = np.zeros((4, 4), np.float32), np.array([0, 1, 7, 8])
    found = model.evaluate(x, y, verbose=0, return_dict=True)  # all logits are equal
    assert set(found) == {"loss", "sparse_top_k_categorical_accuracy"}


def test_every_model_gets_an_optimizer_and_metrics_of_its_own(tmp_path):
    settings = experiment.resolve_length(config_flags.load(write(tmp_path, OBJECTS), []))
    one, two = (experiment.build_model(settings) for _ in range(2))
    assert one.optimizer is not two.optimizer
    assert one.optimizer.get_config() == two.optimizer.get_config()
    assert (one.optimizer.momentum, type(one.loss).__name__) == (0.5, "Scaled")
    assert one.loss.scale == 2.0


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("loss='mes'", "loss is 'mes', but keras.losses has nothing of that name"),
        ("loss='mse', metrics=['auk']", "metrics is 'auk'"),
        ("loss=lambda y, p: y", "is the function"),
        ("loss=losses.Scaled", "loss is the class Scaled: write Scaled()"),
        ("loss=5", "loss is a int: give one of Keras's names"),
        ("train=tftpu.TrainConfig(steps=5, epochs=5)", "set only one of them"),
    ],
)
def test_a_wrong_loss_or_length_is_named(rest, message, tmp_path):
    path = write(tmp_path, rest)
    with pytest.raises(UserError) as error:
        settings = config_flags.load(path, [])
        settings.validate()
        experiment.build_model(settings)
    assert message in str(error.value)


def test_one_metric_and_one_callback_need_no_list(tmp_path):
    path = write(tmp_path, 'loss="mse", metrics="mae", callbacks=keras.callbacks.TerminateOnNaN()')
    settings = config_flags.load(path, [])
    assert settings.metrics == ("mae",)
    (callback,) = settings.callbacks
    assert isinstance(callback, keras.callbacks.TerminateOnNaN)
    wrong = write(tmp_path, 'callbacks=["EarlyStopping"]')
    with pytest.raises(UserError, match="callbacks holds a str: give objects"):
        config_flags.load(wrong, [])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("model.outputs=3", 3),
        ("model.scales=(1.5,2.0)", (1.5, 2.0)),
        ("data.examples=32", 32),
        ("data.data_dir=none", None),
        ("optimizer=adam", "adam"),
        ("metrics=AUC,mae", ("AUC", "mae")),
        ("loss=none", None),
    ],
)
def test_fields_of_own_classes_are_typed_flags(flag, value, tmp_path):
    path = write(tmp_path, "loss='mse'")
    field: object = config_flags.load(path, [f"--config.{flag}"])
    for name in flag.partition("=")[0].split("."):
        field = getattr(field, name)
    assert field == value


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("model.outputs=many", "the value must be a whole number"),
        ("model.output=3", "Did you mean 'outputs'?"),
        ("optimizer.learning_rate=1", "config.optimizer is 'sgd', which has no fields"),
        ("loss.delta=1", "config.loss is keras.losses.Huber, which has no fields"),
    ],
)
def test_wrong_flags_of_own_classes_are_named(flag, message, tmp_path):
    path = write(tmp_path, "loss=keras.losses.Huber(), optimizer='sgd'")
    with pytest.raises(UserError) as error:
        config_flags.load(path, [f"--config.{flag}"])
    assert message in str(error.value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_config_in_place_of_a_named_optimizer_equals_it(name, tmp_path):
    path = write(tmp_path, f"loss='mse', optimizer={name!r}")
    with pytest.raises(UserError, match=r"config\.optimizer is") as error:
        config_flags.load(path, ["--config.optimizer.learning_rate=0.01"])
    with pytest.raises(UserError) as misplaced:
        config_flags.load(path, ["--config.lr=0.01"])
    said = " Write optimizer=" + str(error.value).partition(" Write optimizer=")[2]
    assert f"no field 'lr'. Did you mean 'optimizer.learning_rate'?{said}" in str(misplaced.value)
    found = re.search(r"optimizer=(.*) in the config's file", said)
    assert found
    ours = optimizers.build(eval(found[1]), 16, 100)
    theirs = optimizers.build(name, 16, 100)
    assert type(ours) is type(theirs)
    rate = ours._learning_rate
    assert all(float(rate(step)) == float(theirs.learning_rate) for step in (0, 50, 99, 100))
    settings, plain = (
        {k: v for k, v in one.get_config().items() if k not in ("name", "learning_rate")}
        for one in (ours, theirs)
    )
    assert settings == plain
    assert bool(plain.get("weight_decay")) == ("leaves biases and norms" in said)


def test_a_length_on_the_command_line_wins_over_the_config(tmp_path):
    path = write(tmp_path, "train=tftpu.TrainConfig(epochs=5)")

    def length(*flags: str) -> tuple[int | None, int | None]:
        train = config_flags.load(path, [f"--config.train.{flag}" for flag in flags]).train
        return train.steps, train.epochs

    assert length() == (None, 5)
    assert length("steps=7") == (7, None)
    assert length("epochs=2") == (None, 2)
    assert length("steps=7", "epochs=none") == (7, None)
    with pytest.raises(UserError, match="both None: set one"):
        config_flags.load(path, ["--config.train.epochs=none"]).validate()
    given = r"--config.train.steps=7 and --config.train.epochs=2 both give the length of the run"
    with pytest.raises(UserError, match=given):
        length("epochs=2", "steps=7")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model": "build(self):\n        1 / 0\n"}, "Linear.build() fails in line"),
        ({"model": "build(self):\n        pass\n"}, "Linear.build() returns a NoneType"),
        ({"data": "training(self, context):\n        1 / 0\n"}, "Sums.training() fails in line"),
    ],
)
def test_a_mistake_in_own_code_ends_with_file_and_line(files, message, tmp_path, capsys):
    texts = {"model": projects.MODEL, "data": projects.DATA}
    ((module, method),) = files.items()
    start = texts[module].index(f"def {method.partition('(')[0]}") + len("def ")
    path = write(tmp_path, "loss='mse'", **{module: texts[module][:start] + method})
    assert main(["train", f"--config={path}", "--workdir=run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rank=8", "argument 'rank'. Did you mean 'lora'?"),
        ("sequence_len=8", "argument 'sequence_len'. Did you mean 'sequence_length'?"),
        ("wings=2", "argument 'wings'. Allowed: freeze"),
    ],
)
def test_an_argument_that_a_class_does_not_take_is_answered_with_its_fields(given, said, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        f"import tftpu\n\nmodel = tftpu.KerasHub('x', 'causal_lm', {given})\n"
        "def get_config(): ...\n"
    )
    with pytest.raises(UserError, match=r"line 3 of mine\.py with TypeError") as raised:
        config_flags.load(str(path), [])
    assert said in str(raised.value)


@pytest.mark.parametrize("words", [["train", "--config=mine"], ["config", "show", "mine"]])
def test_a_config_file_without_its_ending_is_pointed_to(words, tmp_path, capsys):
    write(tmp_path, "loss='mse'")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "but there is a file of that name. Did you mean 'mine.py'?" in said
    assert said.endswith(f"Type: tftpu {' '.join(words)}.py\n")


@pytest.mark.slow
def test_a_run_that_a_script_made_is_evaluated_with_a_config(tmp_path, capsys):
    path = write(tmp_path, "loss='mse'")
    settings = config_flags.load(path, [])
    with tftpu.connect().scope():
        model = settings.model.build()
        model.compile("sgd", "mse")
    trainer = tftpu.Trainer(model, "run")
    data = settings.data.training(tftpu.DataContext(0, 16))
    evaluation = settings.data.evaluation(tftpu.DataContext(0, 16))
    trainer.fit(data, steps=12)
    loss = trainer.evaluate(evaluation, return_dict=True)["loss"]
    assert main(["evaluate", "--workdir=run"]) == 2
    said = capsys.readouterr().err
    assert "tftpu: Give a config with the model and the data of the run in 'run', --" in said
    assert "made by a script with tftpu.Trainer" in said and "--config=FILE.py" in said
    assert main(["evaluate", "--workdir=run", f"--config={path}"]) == 0
    assert capsys.readouterr().out.startswith(f"step 12  loss {loss:.4f}")
    assert main(["export-weights", "--workdir=run", f"--config={path}", "--to=w.safetensors"]) == 0
    # Another model is noticed.
    wide = ["--config.model.outputs=2"]
    assert main(["evaluate", "--workdir=run", f"--config={path}", *wide]) == 2


@pytest.mark.slow
def test_a_run_whose_code_has_moved_is_evaluated_from_there(tmp_path, capsys):
    rest = "loss='mse', train=tftpu.TrainConfig(steps=6)"
    path = write(tmp_path / "here", rest)
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0
    (tmp_path / "here").rename(tmp_path / "there")
    sys.path.remove(str(tmp_path / "here"))
    for name in ("mine", "model", "data"):
        sys.modules.pop(name)
    capsys.readouterr()
    assert main(["evaluate", "--workdir=run"]) == 2
    said = capsys.readouterr().err
    assert f"was made with the config {path}, which is code" in said
    assert "give the path of that file on this machine with --config=FILE.py" in said
    assert main(["evaluate", "--workdir=run", f"--config={tmp_path / 'there' / 'mine.py'}"]) == 0


@pytest.mark.slow
def test_a_workdir_from_elsewhere_imports_no_file_that_was_not_named(tmp_path, capsys, monkeypatch):
    """Nor one beside the config that this does not import; what it imports later, it does."""
    rest = "loss='mse', train=tftpu.TrainConfig(steps=6)"
    later = projects.CONFIG.format(rest=rest).replace("from model import Linear\n", "")
    later = later.replace("    return", "    from model import Linear\n    return")
    other = projects.MODEL + f"\nopen({str(tmp_path / 'ran')!r}, 'w')"
    path = write(tmp_path / "code", rest, mine=later, other=other)
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0
    for name in ("mine", "model", "data"):
        sys.modules.pop(name)
    assert main(["evaluate", "--workdir=run"]) == 0
    text = Path("run/config.json").read_text()
    Path("run/config.json").write_text(text.replace("model.Linear", "other.Linear"))
    assert main(["evaluate", "--workdir=run", f"--config={path}"]) == 2
    assert "'other' is not part of the run's own code" in capsys.readouterr().err
    Path("run/config.json").write_text(text.replace('mine.py"', 'other.py"'))
    sys.modules.pop("model")
    assert main(["evaluate", "--workdir=run"]) == 2
    assert "which is code. If you trust it, give the path" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    Path("run/config.json").write_text(text)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    sys.modules.pop("model", None)
    assert main(["evaluate", "--workdir=run"]) == 2
    assert main(["evaluate", "--workdir=run", f"--config={path}"]) == 0
    assert main(["evaluate", "--workdir=run"]) == 0


@pytest.mark.slow
def test_data_without_an_evaluation_split_train_and_export(tmp_path, capsys):
    text = projects.DATA.replace("def evaluation", "def unused")
    path = write(tmp_path, "loss='mse', train=tftpu.TrainConfig(steps=6)", data=text)
    assert main(["train", f"--config={path}", "--workdir=run"]) == 0
    assert main(["export-weights", "--workdir=run", "--to=w.safetensors"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "--workdir=run"]) == 2
    assert "Sums.evaluation() returns None" in capsys.readouterr().err


def test_data_are_shown_and_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 0.1)
    path = write(tmp_path, "loss='mse'")
    assert main(["data", "show", f"--config={path}"]) == 0
    assert "float32 (3, 4)" in capsys.readouterr().out
    assert main(["data", "check", f"--config={path}", "--hosts=2"]) == 0
    said = capsys.readouterr().out
    assert "a host's batch is float32[8, 4]" in said
    assert "each of 2 hosts reads all of the tf.data.Dataset" in said


def test_the_resolved_config_is_shown(tmp_path, capsys):
    path = write(tmp_path, OBJECTS)
    assert main(["config", "show", path, "--config.model.outputs=3"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert shown["config.model"] == "model.Linear"
    assert shown["config.model.outputs"] == "3"
    assert shown["config.train.epochs"] == "4"
    assert shown["config.loss"].startswith("losses.Scaled(")
    assert "learning_rate=0.05" in shown["config.optimizer"]


def test_the_fields_of_a_run_are_its_own(tmp_path, capsys):
    path, run = write(tmp_path, OBJECTS), tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    experiment = config_flags.load(path, ["--config.model.outputs=3"])
    (run / "config.json").write_text(to_json(experiment))
    (run / "goodput.json").touch()
    assert main(["config", "show", str(run), "--config.train.epochs=2"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert shown["config.model.outputs"] == "3" and shown["config.train.epochs"] == "2"


def test_functions_and_objects_are_described_as_plain_data(tmp_path):
    settings = config_flags.load(write(tmp_path, "loss={'dense': losses.half}"), [])
    made = keras_objects.build_objects(settings.loss, "loss")
    assert made["dense"](np.ones((2, 1)), np.zeros((2, 1))).numpy().tolist() == [0.5, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize(("named", "marking"), [("acc", "accuracy"), ("accuracy", "acc")])
def test_the_best_checkpoint_is_marked_by_accuracy_however_it_is_spelled(named, marking, tmp_path):
    rest = f"loss='mse', metrics='mae', train=tftpu.TrainConfig(steps=6, best_metric={marking!r})"
    path = write(tmp_path, rest)
    given = [f"--config={path}", "--workdir=run", f"--config.metrics={named}"]
    assert main(["train", *given]) == 0
    assert json.loads(Path("run/result.json").read_text())["best"]["metric"] == named
