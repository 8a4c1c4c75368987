"""Commands are single files found by listing the folder; their flags and their help."""

import dataclasses
import select
import subprocess
import sys
import time

import pytest

from tests.support.repository import doc_blocks
from tftpu.errors import UserError
from tftpu.launch import commands as package
from tftpu.launch import main as command_line
from tftpu.launch.commands.training import train
from tftpu.launch.settings.options import Overrides, RunOptions, flag, required
from tftpu.launch.settings.parsing import parse, to_argv

GREET = '''"""Greets somebody.

More about greetings.

    tftpu {command} --name=Ada
"""

import dataclasses

from tftpu.launch.settings.options import flag, required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    name: str = required("NAME", "whom to greet")
    times: int = flag(1, "number of greetings", minimum=1)
    loud: bool = flag(False, "use capitals")


def run(options: Options) -> None:
    greeting = f"Hello, {{options.name}}."
    print(*[greeting.upper() if options.loud else greeting] * options.times)
'''


def test_the_command_that_contributing_adds_is_one_file(tmp_path, monkeypatch, capsys):
    (block,) = [b for b in doc_blocks.blocks("CONTRIBUTING.md") if b.title == "greet.py"]
    (tmp_path / block.title).write_text(block.text)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    assert command_line.main(["greet", "--name=Ada", "--times=2"]) == 0
    assert capsys.readouterr().out == "Hello, Ada.\nHello, Ada.\n"
    assert command_line.main(["greet", "Ada"]) == 0
    assert capsys.readouterr().out == "Hello, Ada.\n"
    assert command_line.main(["help", "greet"]) == 0
    assert "example:\n  tftpu greet --name=Ada --times=2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "command"), [("say_hello.py", "say-hello"), ("polite/greet.py", "polite greet")]
)
def test_one_file_adds_a_command(file, command, tmp_path, monkeypatch, capsys):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if path.parent != tmp_path:  # a group of commands is a package
        (path.parent / "__init__.py").touch()
    path.write_text(GREET.format(command=command))
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    words = command.split()
    assert command_line.main([*words, "--name", "Ada", "--loud", "--times", "2"]) == 0
    assert capsys.readouterr().out == "HELLO, ADA. HELLO, ADA.\n"
    assert command_line.main([*words, "--name=Ada", "--noloud"]) == 0
    assert capsys.readouterr().out == "Hello, Ada.\n"
    assert command_line.main([*words]) == 2
    assert f"tftpu {command} needs --name=NAME (whom to greet)." in capsys.readouterr().err
    assert command_line.main([*words, "--name=Ada", "--times=0"]) == 2
    assert "--times=0: the value must be a whole number of 1 or more." in capsys.readouterr().err
    assert command_line.main(["help"]) == 0
    assert f"  {command} " in capsys.readouterr().out
    assert command_line.main([*words, "--help"]) == 0
    assert capsys.readouterr().out == (
        f"usage: tftpu {command} --name=NAME [--flag=value ...]\n\n"
        "Greets somebody.\n\n"
        "More about greetings.\n\n"
        "  --name=NAME    whom to greet (required)\n"
        "  --times=VALUE  number of greetings (default: 1)\n"
        "  --[no]loud     use capitals (default: false)\n\n"
        f"example:\n  tftpu {command} --name=Ada\n"
    )


@pytest.mark.parametrize("name", command_line.load_commands())
def test_every_command_has_a_summary_and_an_example_that_parses(name):
    command = command_line.load_commands()[name]
    assert command.summary.endswith(".")
    assert all(flag.help for flag in command.flags)
    text = command.format_help()
    assert all(len(line) <= 100 for line in text.splitlines())
    assert command.example
    assert command.example not in command.description
    for line in command.example.splitlines():
        words = line.split()
        assert words[: 1 + len(name.split())] == ["tftpu", *name.split()]
        assert parse(name, command.options, words[1 + len(name.split()) :])
        assert line.strip().split()[0] in text


@pytest.mark.parametrize("words", [["launch"], ["launch", "--help"], ["help", "launch"]])
def test_a_group_of_commands_has_its_help(capsys, words):
    assert command_line.main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: tftpu launch ") and "launch tpu-vm-attach" in shown
    assert "  evaluate " not in shown


def test_help_of_a_command_in_either_order(capsys):
    assert command_line.main(["help", "data", "check"]) == 0
    first = capsys.readouterr().out
    assert command_line.main(["data", "check", "--help"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.medium
def test_all_commands_are_described_without_tensorflow_or_google_clients():
    code = (
        # Some packages load a part of google.cloud when the interpreter starts.
        "import sys\nbefore = set(sys.modules)\nfrom tftpu.launch import main\n"
        "found = main.load_commands()\n"
        "print({name: [flag.name for flag in c.flags] for name, c in found.items()}['plot'])\n"
        "loaded = set(sys.modules) - before\n"
        "print({'tensorflow', 'keras', 'google.cloud', 'matplotlib', 'grpc'} & loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    flags, heavy = done.stdout.splitlines()
    assert "'workdirs'" in flags and "'output'" in flags
    assert heavy == "set()"


# Parsing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Many(Overrides):
    """One flag of each kind."""

    text: str | None = flag(None, "text")
    count: int = flag(3, "a count")
    share: float | None = flag(None, "a share", minimum=-2)
    yes: bool = flag(False, "yes")
    files: tuple[str, ...] = required("FILE", "files", word=True)


def test_values_follow_an_equals_sign_or_a_space():
    wanted = Many(
        overrides=("--config.train.steps=500", "--config.model.name=x"),
        text="a=b",
        count=-1,
        share=-1.5,
        yes=True,
        files=("f", "g"),
    )
    joined = "--text=a=b --count=-1 --share=-1.5 --yes f --config.train.steps=500 g"
    spaced = "f --text a=b --count -1 g --share -1.5 --yes --config.train.steps 500"
    assert parse("x", Many, [*joined.split(), "--config.model.name=x"]) == wanted
    assert parse("x", Many, [*spaced.split(), "-config.model.name", "x"]) == wanted
    assert parse("x", Many, to_argv(wanted)) == wanted


def test_words_after_two_dashes_are_not_flags():
    assert parse("x", Many, ["--", "--text=f"]).files == ("--text=f",)


def test_later_values_win_and_defaults_stay():
    options = parse("x", Many, ["--yes", "--noyes", "--count=1", "--count=2", "f"])
    assert (options.yes, options.count, options.text) == (False, 2, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count=2.5"], "--count=2.5: the value must be a whole number."),
        (["--share=-3"], "--share=-3: the value must be a number of -2 or more."),
        (["--yes=maybe"], "--yes=maybe: the value must be true or false."),
        (["--text"], "--text has no value: write --text=VALUE (text)."),
        (["--text", "--yes"], "--text has no value: write --text=VALUE (text)."),
        (["--config.train.steps"], "--config.train.steps has no value"),
        (["--txt=a"], "Did you mean '--text'?"),
        (["--notext=a"], "has no flag --notext"),
        (["--overrides=a"], "has no flag --overrides"),
    ],
)
def test_a_wrong_flag_gives_a_clear_message(words, message):
    with pytest.raises(UserError) as error:
        parse("x", Many, ["f", *words])
    assert message in str(error.value)


def test_required_flags_are_named_together():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Two:
        first: str = required("A", "one", hint=lambda: "There are 1 and 2.")
        second: str = required("B", "two")

    with pytest.raises(
        UserError, match=r"needs --first=A \(one\) and --second=B \(two\)\. There are 1 and 2\."
    ):
        parse("x", Two, [])
    with pytest.raises(UserError, match=r"needs --second=B \(two\)\.$"):
        parse("x", Two, ["--first=1"])


def test_devices_of_the_command_line_are_validated_with_the_config():
    options = parse("x", RunOptions, ["--config=digits_resnet", "--virtual_devices=8"])
    assert options.load_experiment().cluster.virtual_devices == 8
    with pytest.raises(UserError, match="127 cannot be divided among 8"):
        dataclasses.replace(
            options, overrides=("--config.data.global_batch_size=127",)
        ).load_experiment()


def test_devices_of_the_config_stay_unless_flags_name_others():
    override = "--config.cluster.virtual_devices=4"

    def cluster(*words: str) -> tuple[str, int | None]:
        options = parse("x", RunOptions, ["--config=digits_resnet", *words])
        assert parse("x", RunOptions, to_argv(options)) == options
        found = options.load_experiment().cluster
        return found.tpu, found.virtual_devices

    assert cluster() == ("auto", None)
    assert cluster(override) == ("auto", 4)
    assert cluster(override, "--config.cluster.tpu=none") == ("none", 4)
    assert cluster(override, "--virtual_devices=2", "--tpu=none") == ("none", 2)


def test_the_watchdog_flag_sets_the_option(monkeypatch, tmp_path):
    from tftpu.launch.run import training

    seen = []
    monkeypatch.setattr(training, "train", lambda experiment, *_, **__: seen.append(experiment))
    words = ["train", "--config=digits_resnet", "--watchdog=90", f"--workdir={tmp_path}"]
    assert command_line.main(words) == 0
    assert seen[0].train.watchdog_seconds == 90


def test_restarts_run_the_same_command_without_them(monkeypatch, tmp_path):
    from tftpu.launch.run import supervise

    seen = []

    def ran(command: list[str], workdir: str, restarts: int) -> int:
        seen.append((command, workdir, restarts))
        return 3

    monkeypatch.setattr(supervise, "run", ran)
    words = ["--config", "digits_resnet", "--config.train.steps", "5", "--workdir", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        command_line.main(["train", *words, "--restarts", "2"])
    assert ended.value.code == 3
    ((command, workdir, restarts),) = seen
    assert (workdir, restarts) == (str(tmp_path), 2)
    (tmp_path / "tftpu.py").write_text("raise ImportError('the one in the current folder')")
    help_of = [*command[: command.index("train")], "train", "--help"]
    subprocess.run(help_of, cwd=tmp_path, check=True, capture_output=True)
    again = command[command.index("train") + 1 :]
    assert parse("train", train.Options, again) == parse("train", train.Options, words)


# Start-up


def test_the_first_line_is_printed_before_tensorflow_is_imported(tmp_path):
    """The module that imports TensorFlow is replaced by one that waits forever."""
    (tmp_path / "keras.py").write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "tftpu.launch.main", "train", "--config=digits_resnet"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )
    try:
        start = time.monotonic()
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        first = process.stdout.readline()
        print(f"after {time.monotonic() - start:.2f} s")
        assert first.startswith("tftpu train digits_resnet: 900 steps of 128 examples, in runs/")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_packages_that_no_command_uses_are_not_imported_with_tensorflow_and_work_after():
    code = (
        "import gc, sys\nfrom tftpu.launch import startup\nfrom tftpu.quick_import import UNUSED\n"
        "startup.import_tensorflow()\n"
        "print('keras' in sys.modules, 'tensorflow' in sys.modules)\n"
        "print(set(UNUSED) & set(sys.modules))\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "import importlib, importlib.util\n"
        "found = [n for n in UNUSED if importlib.util.find_spec(n)]\n"
        "print({importlib.import_module(n).__name__ for n in found} == set(found))\n"
        "import jax, sklearn.datasets\n"
        "print(len(sklearn.datasets.load_digits().data), jax.numpy.ones(3).sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True True", "set()", "True True", "True", "1797 3.0"], (
        done.stderr
    )
