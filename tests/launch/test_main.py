"""`tftpu COMMAND`: quick answers, and one clear message for every mistake."""

import errno
import json
import os
import resource
import subprocess
import sys

import pytest

from tests.support import warm
from tests.support.fakes.fake_google_cloud import SECRET, SECRETS
from tests.support.messages import check_message
from tests.support.workdirs import held_by_another
from tftpu import models
from tftpu.checkpoint import manifest
from tftpu.config import TrainConfig, to_json
from tftpu.errors import UserError
from tftpu.launch import main as command_line
from tftpu.launch.run import start
from tftpu.launch.settings import config_flags
from tftpu.launch.startup import build_command
from tftpu.storage import files, locks

TRAIN = ("train", "--config=digits_resnet")

# The arguments, and a part of the message.
MISTAKES = [
    (["trian"], "Did you mean 'train'?"),
    (["train"], "needs CONFIG (name of a config"),
    (["train", "--config=digit_resnet"], "Did you mean 'digits_resnet'?"),
    (["train", "--config=/nowhere/mine.py"], "There is no config file"),
    (["train", "digits_resnet", "python_gpt"], "takes one CONFIG, but 2 are given"),
    (["train", "python_gpt", "--config=digits_resnet"], "takes one CONFIG, but 2 are given"),
    (["evaluate", "nix"], "There is no run in 'nix'"),
    (["evaluate", "my.py", "--workdir=runs/a"], "knows its config. Type: tftpu evaluate runs/a"),
    (["train", "--config", "digits_resnet", "--workdri", "x"], "Did you mean '--workdir'?"),
    (["train", "--config", "--workdir=x"], "--config has no value"),
    ([*TRAIN, "--workdri=x"], "Did you mean '--workdir'?"),
    ([*TRAIN, "--workdir"], "write --workdir=RUN (folder"),
    ([*TRAIN, "--workdir="], "--workdir has no value"),
    ([*TRAIN, "--workdir", ""], "--workdir has no value"),
    ([*TRAIN, "--virtual_devices=many"], "--virtual_devices=many"),
    ([*TRAIN, "--virtual_devices=0"], "virtual_devices is 0"),
    ([*TRAIN, "--virtual_devices=2", "--tpu=local"], "set only one of the two"),
    ([*TRAIN, "--config.train.stepz=5"], "Did you mean 'steps'?"),
    ([*TRAIN, "--config.trian.steps=5"], "Did you mean 'train'?"),
    ([*TRAIN, "--config.train.learning_rate=5"], "Did you mean 'optimizer.learning_rate'?"),
    ([*TRAIN, "--config.train.steps=many"], "a whole number"),
    ([*TRAIN, "--config.train.steps=1.5"], "a whole number"),
    ([*TRAIN, "--config.train.steps="], "has no value"),
    ([*TRAIN, "--config.train=5"], "names a group"),
    ([*TRAIN, "--config.train.steps=0"], "train.steps is 0"),
    ([*TRAIN, "--config.train.global_clipnorm=-1"], "above 0"),
    ([*TRAIN, "--config.train.precision=float16"], "Did you mean 'mixed_float16'?"),
    ([*TRAIN, "--config.train.profile=9:3"], "FIRST below LAST"),
    ([*TRAIN, "--config.optimizer.name=adm"], "Did you mean 'adam'?"),
    ([*TRAIN, "--config.optimizer=adm"], "Did you mean 'adam'?"),
    (
        [*TRAIN, "--config.optimizer=adam", "--config.optimizer.learning_rate=1"],
        "config.optimizer is 'adam', which has no fields",
    ),
    (
        ["train", "--config=python_gpt", "--config.data.train_text=mine/*"],
        "has no field 'train_text'. It is a field of Texts and Tokens, and the data of this "
        "config are Text.",
    ),
    ([*TRAIN, "--config.train.epochs=0"], "train.epochs is 0"),
    ([*TRAIN, "--config.loss=mse"], "train.label_smoothing=0.1 changes only the default loss"),
    ([*TRAIN, "--config.callbacks=x"], "cannot be set on the command line"),
    ([*TRAIN, "--config.train.writers=mlflow,wandbb"], "train.writers has 'wandbb'"),
    ([*TRAIN, "--config.train.writers='mlflow"], "names in brackets, as (a,b)"),
    ([*TRAIN, "--config.train.seed=-1"], "train.seed is -1: it must be from 0 to 4294967295"),
    ([*TRAIN, "--config.train.seed=99999999999"], "train.seed is 99999999999"),
    ([*TRAIN, "--config.model.width=0"], "model.width is 0: it must be 1 or more"),
    ([*TRAIN, "--config.model.blocks=(1,-2)"], "model.blocks is (1, -2): it must be 1 or more"),
    (
        [*TRAIN, "--config.model.dropout=1"],
        "model.dropout is 1.0: it must be at least 0, and below",
    ),
    (["train", "--config=python_gpt", "--config.model.heads=0"], "model.heads is 0"),
    ([*TRAIN, "--config.model.blocks=(1,x)"], "whole numbers in brackets"),
    ([*TRAIN, "--virtual_devices=7"], "use a multiple of 112, such as 112 or 224"),
    (
        [*TRAIN, "--virtual_devices=8", "--config.model.norm_batch=32"],
        "does not divide the 16 examples",
    ),
    ([*TRAIN, "--config.model.norm_batch=all"], "or 'global'"),
    ([*TRAIN, "--workdir=/proc/nowhere"], "cannot be written"),
    ([*TRAIN, "--config.optimizer.decay_steps=(5,9)"], "decay_steps works only with the decay"),
    (
        [*TRAIN, "--config.optimizer.decay=step", "--config.optimizer.decay_steps=(5,-2)"],
        "optimizer.decay_steps is (5, -2): give steps of 1 or more in rising order",
    ),
    (["data", "check", "--config=digits_resnet", "--zone=nozone"], "--zone=nozone is not a zone"),
    (["data", "show", "--config=digits_resnet", "--output=x.jpgg"], "must end in .png"),
    (["evaluate"], "needs RUN (folder of the run"),
    (["generate", "runs/a", "--no_adapters"], "Did you mean '--base'?"),
    (["evaluate", "--workdir=/nowhere"], "There is no run in"),
    (["evaluate", "--workdir=/nowhere", "--output=/"], "--output=/ is a folder"),
    (["evaluate", "--config=digits_resnet"], "needs RUN"),
    (["status", "x", "--config.train.steps=5"], "takes no --config"),
    (["data", "chek"], "Did you mean 'check'?"),
    (["data", "verify"], "needs FOLDER"),
    (["data", "verify", "a", "b"], "takes one FOLDER"),
    (["data", "convert", "--source=images:x"], "needs --output=DIR ("),
    (["data", "convert"], "needs KIND:WHAT (source to convert"),
    (["export-weights", "--to=a.bin", "--workdir=x"], "must end in .weights.h5 or .safetensors"),
    (["export-weights", "--to=a.weights.h5", "--workdir=/nowhere"], "There is no run in"),
    ([*TRAIN, "--restarts=-1"], "--restarts=-1"),
    *(
        ([*TRAIN, f"--watchdog={v}"], "must be a time such as 30s, 5m, 2h or 7d of 1s or")
        for v in ("inf", "nan", "1e300")
    ),
    ([*TRAIN, "--watchdog=99999999999d"], "watchdog_seconds is 8.64e+15: it must be at most"),
    ([*TRAIN, "--config.train.watchdog_seconds=inf"], "watchdog_seconds is inf: it must be a f"),
    (["data", "check", "--config=python_gpt", "--need=nan"], "the value must be a number"),
    *(
        ([*TRAIN, f"--workdir={path}"], "is not a folder that tftpu can use")
        for path in ("gs://", "gs:///run", "s3://bucket/run")
    ),
    *(
        ([*words, f"--workdir={'x' * 256}"], f"--workdir={'x' * 40}… is too long: give")
        for words in (TRAIN, ["evaluate"], ["search", "--report"], ["serve"])
    ),
    (["init", "x" * 256], "is too long for its file system: give a shorter one."),
    (["train", f"--config={'x' * 256}.py"], "is too long for its file system"),
    (["evaluate", "--workdir=gs://"], "--workdir=gs:// is not a folder"),
    (["data", "serve", "--config=digits_resnet", "--host=10.0.0.3"], "cannot be served"),
    (["data", "serve", "--config=python_gpt"], "needs --host=HOST ("),
    ([*TRAIN, "--config.train.checkpoint_minutes=-1"], "train.checkpoint_minutes is -1"),
    (["configs", "all"], "takes only flags"),
    (
        [
            *("train", "--config=python_gpt", "--virtual_devices=8"),
            "--config.data.global_batch_size=127",
        ],
        "A global batch of 127 cannot be divided among 8 replicas",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_gives_one_clear_message_and_exit_code_2(
    arguments, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert command_line.main(arguments) == 2
    check_message(capsys.readouterr().err, message)


def test_all_mistaken_fields_are_named_at_once(capsys):
    mistakes = ["--config.train.stepz=60", "--config.cluster.mash=data:1"]
    assert command_line.main([*TRAIN, *mistakes]) == 2
    said = capsys.readouterr().err
    assert "'stepz'. Did you mean 'steps'?" in said
    assert "'mash'. Did you mean 'mesh'?" in said


@pytest.mark.medium
def test_a_refused_run_leaves_no_workdir(tmp_path, capsys):
    command = [*TRAIN, f"--workdir={tmp_path}/run", "--config.cluster.tpu=nowhere"]
    assert command_line.main(command) == 2
    assert "cannot be connected to" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    command[-2] = f"--workdir={tmp_path}/mine"
    assert command_line.main(command) == 2
    assert (tmp_path / "mine").exists()


@pytest.mark.medium
@pytest.mark.parametrize("flags", [[], ["-O"]], ids=["plain", "without asserts"])
def test_mistakes_are_found_before_tensorflow_is_imported(flags, tmp_path):
    """Also under `python -O`, which removes every `assert` of the product."""
    code = (
        "import json, sys\n"
        "from tftpu.launch.main import main\n"
        "codes = [main(mistake) for mistake in json.loads(sys.argv[1])]\n"
        "print(set(codes), 'tensorflow' in sys.modules)\n"
    )
    typed = json.dumps([arguments for arguments, _ in MISTAKES])
    done = subprocess.run(
        [sys.executable, *flags, "-c", code, typed], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split("\n")[-2] == "{2} False"


@pytest.mark.medium
@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["train", "--help"], ["--version"]])
def test_help_answers_in_under_half_a_second(arguments):
    """On a machine where Python itself starts in 70 ms; on a slower one in as many such starts."""
    command = [sys.executable, "-m", "tftpu.launch.main", *arguments]
    starts = [
        (_spend_processor_seconds(command), _spend_processor_seconds([sys.executable, "-c", ""]))
        for _ in range(3)
    ]
    ours, bare = map(min, zip(*starts, strict=True))
    assert ours < max(0.5, bare * 0.5 / 0.07)


def _spend_processor_seconds(command):
    """Runs a command; returns its processor seconds, which depend little on other load."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_configs_are_listed_one_line_each(capsys):
    assert command_line.main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(config_flags.list_names())
    assert all(len(line) <= 100 for line in lines)


def test_models_are_listed_with_parameters_and_sizes(capsys):
    assert command_line.main(["models"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    # torchvision's table; 4 bytes each are 97.5 MiB
    assert lines["resnet50"].split()[1:] == ["ResNet", "25,557,032", "parameters", "97.5", "MiB"]
    assert sorted(lines) == models.names()


def test_the_fields_of_a_model_are_listed_by_its_name(capsys):
    assert command_line.main(["models", "llama_8b"]) == 0
    fields = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (fields["layers"], fields["hidden"], fields["attention"]) == ("32", "14336", "'auto'")
    assert command_line.main(["models", "llama_9b"]) == 2
    assert "There is no model 'llama_9b'. Did you mean 'llama_8b'?" in capsys.readouterr().err


def test_a_workdir_locked_by_another_run_fails_with_a_clear_error(tmp_path, capsys):
    with held_by_another(tmp_path) as holder:
        assert command_line.main([*TRAIN, f"--workdir={tmp_path}"]) == 2
        assert f"held by process {holder}" in capsys.readouterr().err
    with locks.locked(str(tmp_path)):  # the lock was released with its holder
        pass


def test_a_disk_without_locks_does_not_prevent_training(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refused)
    with locks.locked(str(tmp_path)):
        assert "The system cannot lock" in caplog.text


def run_in(workdir, experiment) -> None:
    """Creates the files of a run with a checkpoint, as far as they are looked at."""
    files.write_whole(workdir / "config.json", to_json(experiment).encode())
    files.write_whole(workdir / "checkpoints/5/manifest.json", b"{}")


def test_a_workdir_of_another_model_fails_with_the_fields_that_differ(tmp_path, capsys):
    run_in(tmp_path, config_flags.load("digits_resnet", ["--config.model.width=16"]))
    assert command_line.main([*TRAIN, f"--workdir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "another model configuration: model.width was 16 and is 32. That changes" in said
    assert f"such as --workdir={tmp_path}_2." in said


def test_of_a_group_inside_a_group_only_the_fields_that_differ_are_named(tmp_path):
    from tftpu.input_pipelines.augment.settings import Augment
    from tftpu.input_pipelines.sources import StreamedImages

    experiment = config_flags.load("digits_resnet", [])
    experiment.data = StreamedImages(data_dir="x")
    run_in(tmp_path, experiment)
    experiment.data = StreamedImages(data_dir="x", augment=Augment(crop=False))
    with pytest.raises(
        UserError, match=r"configuration: data\.augment\.crop was True and is False\. That"
    ):
        start._check_same_run(experiment, str(tmp_path))


def test_of_long_lists_that_differ_a_message_names_the_first_difference():
    words = [f"word{n}" for n in range(100)]
    before, now = {"words": words}, {"words": [*words[:40], "other"]}
    (found,) = start._list_differences("data", before, now, {})
    assert found.place == "data.words"
    assert found.text == "had 100 values and has 41, which differ from number 41 on"
    (found,) = start._list_differences("data", {"words": words[:2]}, {"words": words[:1]}, {})
    assert found.text == "was ['word0', 'word1'] and is ['word0']"


@pytest.mark.parametrize(
    ("train", "length"),
    [
        (TrainConfig(epochs=1), "1 epoch in steps"),
        (TrainConfig(epochs=2), "2 epochs in steps"),
        (TrainConfig(steps=1), "1 step"),
        (TrainConfig(steps=1500), "1,500 steps"),
    ],
)
def test_the_length_of_a_run_is_printed_in_words(train, length):
    assert start._format_length(train) == length


def test_a_workdir_with_nothing_to_resume_takes_another_configuration(tmp_path):
    """A run that diverged before its first checkpoint leaves only its config.json."""
    run_in(tmp_path, config_flags.load("digits_resnet", ["--config.optimizer.learning_rate=9"]))
    experiment = config_flags.load("digits_resnet", [])
    with pytest.raises(UserError, match=r"optimizer\.learning_rate was 9\.0 and is"):
        start._check_same_run(experiment, str(tmp_path))
    (tmp_path / "checkpoints/5/manifest.json").unlink()
    start._check_same_run(experiment, str(tmp_path))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
def test_a_damaged_config_of_a_run_is_named(content, tmp_path, capsys, caplog):
    """Training can do without it; evaluation cannot."""
    experiment = config_flags.load("digits_resnet", [])
    run_in(tmp_path, experiment)
    (tmp_path / "config.json").write_bytes(content)
    start._check_same_run(experiment, str(tmp_path))
    assert "config.json cannot be read and is ignored" in caplog.text
    assert command_line.main(["evaluate", f"--workdir={tmp_path}"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_the_way_data_is_read_may_change_between_restarts(tmp_path):
    from tftpu.input_pipelines.sources import Records

    def experiment(**data):
        made = config_flags.load("digits_resnet", [])
        made.data = Records(data_dir="x", **data)
        return made

    run_in(tmp_path, experiment())
    for same in ({"service": "a:1"}, {"cache_dir": "/b", "cache_gb": 1.0}):
        start._check_same_run(experiment(**same), str(tmp_path))
    for other in ({"shuffle": 5}, {"global_batch_size": 8}):
        with pytest.raises(UserError, match="another data configuration"):
            start._check_same_run(experiment(**other), str(tmp_path))


def test_a_users_own_config_file_is_loaded(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from tftpu.launch.configs import digits_resnet\n"
        "def get_config():\n"
        "    config = digits_resnet.get_config()\n"
        "    config.train.steps = 7\n"
        "    return config\n"
    )
    assert config_flags.load(str(path), []).train.steps == 7
    assert config_flags.load(str(path), ["--config.train.steps=8"]).train.steps == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.train.steps = 1e4", "train.steps is 10000.0: its type must be int"),
        ("config.train.writers = ['wandb']", r"train.writers is ['wandb']: its type must be tuple"),
        ("config.data.shift = '1'", "data.shift is '1': its type must be int"),
        (
            "config.train.ema_momentum = True",
            "train.ema_momentum is True: its type must be float | None",
        ),
        ("config.model.blocks = (1, 'x')", "its type must be tuple[int, ...]"),
        ("config.train = type(config.train)(stepz=5)", "fails in line 4 of mine.py with TypeError"),
        ("config = __import__('sys').exit(3)", "fails in line 4 of mine.py with SystemExit: 3"),
    ],
)
def test_a_mistake_in_a_config_file_gives_a_clear_message(line, message, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from tftpu.launch.configs import digits_resnet\n"
        f"def get_config():\n    config = digits_resnet.get_config()\n    {line}\n"
        "    return config\n"
    )
    assert command_line.main(["train", f"--config={path}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_no_secret_of_the_environment_is_written_to_disk(tmp_path):
    """This holds for a run that succeeds and for one that fails."""
    workdir = tmp_path / "run"
    environment = {**os.environ, **dict.fromkeys(SECRETS, SECRET)}

    def printed(*flags):
        command = [sys.executable, "-m", "tftpu.launch.main", *TRAIN, f"--workdir={workdir}"]
        done = warm.run([*command, *flags], capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout + done.stderr

    code, first = printed("--config.train.steps=2", "--config.train.eval_every=2")
    assert code == 0, first
    code, failed = printed("--config.model.width=16")
    assert code == 2, failed
    written = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    assert {"config.json", "metrics.jsonl"} <= {path.name for path in written}
    assert SECRET not in first + failed
    assert not [path for path, data in written.items() if SECRET.encode() in data]


def test_a_folder_of_a_run_leads_to_the_config_it_was_trained_with(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets.py").write_text("from tftpu.launch.configs.digits_resnet import get_config")
    configs = {"runs/mine": "pets.py", "runs/digits_resnet": "", "runs/x": "", "runs/y": "gone.py"}
    for run, file in configs.items():
        os.makedirs(run)
        (tmp_path / run / "goodput.json").touch()
        recorded = {"config_file": file and str(tmp_path / file)}
        (tmp_path / run / "config.json").write_text(json.dumps(recorded))
    for run, typed in (("runs/mine", "pets.py"), ("runs/digits_resnet/", "digits_resnet")):
        assert command_line.main(["bench", run]) == 2
        said = capsys.readouterr().err
        assert f"{run!r} is the folder of a run" in said
        assert said.splitlines()[-1] == f"Type: tftpu bench {typed}"
    for run in ("runs/x", "runs/y"):
        assert command_line.main(["bench", run]) == 2
        assert capsys.readouterr().err.endswith("name the config that it was trained with.\n")
    resumed = "tftpu train pets.py --config.train.steps=9 --workdir=runs/mine"
    for command in ("train", "resume"):
        assert command_line.main([command, "runs/mine", "--config.train.steps=9"]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"Type: {resumed}"
    assert command_line.main(["train", "--workdir=runs/mine"]) == 2
    assert "For example: tftpu train pets.py --workdir=runs/mine\n" in capsys.readouterr().err


def test_a_config_without_its_ending_leads_to_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos.py").write_text("from tftpu.launch.configs.digits_resnet import get_config")
    assert command_line.main(["config", "show", "photoss"]) == 2
    assert "There is no config 'photoss'. Did you mean 'photos.py'?" in capsys.readouterr().err


@pytest.mark.parametrize(("ended", "newest"), [(4, 4), (4, 6), (None, 2)])
def test_a_run_that_ended_says_so_before_it_is_loaded(tmp_path, capsys, monkeypatch, ended, newest):
    (tmp_path / "config.json").write_text(to_json(config_flags.load("digits_resnet", [])))
    if ended:
        (tmp_path / "result.json").write_text(json.dumps({"steps": ended, "evaluation": {}}))
    (tmp_path / "checkpoints" / str(newest)).mkdir(parents=True)
    (tmp_path / "checkpoints" / str(newest) / manifest.FILE).touch()

    def load():
        raise UserError("TensorFlow is loaded")

    monkeypatch.setattr(start.startup, "import_tensorflow", load)
    assert command_line.main([*TRAIN, f"--workdir={tmp_path}", "--config.train.steps=4"]) == 2
    assert ("This run ended at step 4" in capsys.readouterr().out) == (ended == newest)
    more = [*TRAIN, f"--workdir={tmp_path}", "--config.train.steps=9"]
    assert command_line.main(more) == 2
    assert "This run ended" not in capsys.readouterr().out


def test_the_command_starts_again_where_keras_has_another_backend_than_its_engine(tmp_path, capsys):
    words = [*TRAIN, f"--workdir={tmp_path / 'run'}", "--config.cluster.engine=jax"]
    wanted: list[str] = []
    assert command_line.main(words, wanted.append) == 0
    assert wanted == ["jax"]
    assert command_line.main(words) == 2
    assert "Keras is already loaded with the backend tensorflow" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("insists", [False, True])
def test_a_config_that_loads_keras_chooses_the_engine(tmp_path, insists):
    first = "import os; os.environ['KERAS_BACKEND'] = 'tensorflow'\n" if insists else ""
    (tmp_path / "mine.py").write_text(
        f"{first}import keras\nfrom tftpu.launch.configs.digits_resnet import get_config\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    words = ["train", "mine.py", "--config.train.steps=1", "--config.train.eval_every=0"]
    words += ["--config.cluster.engine=jax"] if insists else ["--virtual_devices=2"]
    words += [] if insists else ["--config.cluster.mesh=data:2"]
    done = subprocess.run(
        build_command(words), cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    if insists:
        assert done.returncode == 2 and "set KERAS_BACKEND=jax before" in done.stderr
    else:
        assert done.returncode == 0 and "JAX" in done.stdout, done.stderr


def test_a_changed_field_is_answered_with_the_line_that_resumes_the_run(tmp_path, capsys):
    run_in(tmp_path, config_flags.load("digits_resnet", ["--config.model.blocks=(1,2)"]))
    words = [f"--workdir={tmp_path}", "--config.model.blocks=(2,)", "--config.train.seed=3"]
    assert command_line.main([*TRAIN, *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    expected = f"--workdir={tmp_path} --config.train.seed=3 --config.model.blocks=1,2"
    assert said == f"Type: tftpu train --config=digits_resnet {expected}"
    start._check_same_run(
        config_flags.load("digits_resnet", ["--config.model.blocks=1,2"]), str(tmp_path)
    )


@pytest.mark.parametrize(("steps", "ends"), [(5, True), (6, False)])
def test_a_changed_field_of_a_run_that_ended_is_answered_with_another_workdir(
    tmp_path, capsys, steps, ends
):
    run_in(tmp_path, config_flags.load("digits_resnet", ["--config.model.width=16"]))
    (tmp_path / "result.json").write_text('{"steps": 5, "evaluation": {}}')
    words = ["--config.model.width=8", f"--config.train.steps={steps}"]
    assert command_line.main([*TRAIN, f"--workdir={tmp_path}", *words]) == 2
    said = capsys.readouterr().err
    again = said.splitlines()[-1].split()
    assert ("This run has ended: begin another one" in said) == ends
    assert (f"--workdir={tmp_path}_2" in again) == ("--config.model.width=8" in again) == ends
    assert f"--config.train.steps={steps}" in again


def test_changed_fields_of_several_groups_are_answered_with_one_line(tmp_path, capsys):
    run_in(tmp_path, config_flags.load("digits_resnet", ["--config.model.width=16"]))
    words = ["--config.model.width=8", "--config.data.global_batch_size=64"]
    assert command_line.main([*TRAIN, f"--workdir={tmp_path}", *words]) == 2
    said = capsys.readouterr().err
    assert "another model and data configuration: model.width was 16 and is 8, data." in said
    again = said.splitlines()[-1]
    assert again.startswith("Type: ") and "size=64" not in again
    changes = [word for word in again.split() if word.startswith("--config.")]
    start._check_same_run(config_flags.load("digits_resnet", changes), str(tmp_path))


def test_a_field_of_the_data_may_come_from_a_file(tmp_path):
    from tftpu.input_pipelines.sources import Texts

    def experiment(*classes: str):
        made = config_flags.load("digits_resnet", [])
        made.data = Texts(train_text="t.csv", label="kind", classes=classes)
        return made

    run_in(tmp_path, experiment("a", "b"))
    with pytest.raises(UserError, match="a config may read a field from a file") as refused:
        start._check_same_run(experiment("a", "b", "c"), str(tmp_path))
    weights = f"--config.model.init_from={tmp_path}/checkpoints/5 adds the weights of this one."
    assert f"--workdir={tmp_path}_2, where {weights}" in str(refused.value)


def test_only_a_value_that_nobody_can_have_set_is_called_a_default(tmp_path):
    run_in(tmp_path, config_flags.load("digits_resnet", []))
    changed = config_flags.load("digits_resnet", ["--config.model.dropout=0.5"])
    with pytest.raises(UserError, match=r"model.dropout was 0\.0 and is 0\.5\."):
        start._check_same_run(changed, str(tmp_path))
    recorded = json.loads((tmp_path / "config.json").read_text())
    del recorded["model"]["dropout"]  # the run is older than the field
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(UserError, match=r"model.dropout was 0\.0 by default and is 0\.5\."):
        start._check_same_run(changed, str(tmp_path))
