"""The commands of the documentation that no test can run: each is checked as far as it can be.

They rent machines, install packages, need a TPU or a bucket. Requests to the cloud are made with
`--dry_run`; flags and configs are parsed; extras, files and tags are looked up.
"""

import itertools
import re
import shlex

import pytest

from tests.support.repository import doc_blocks
from tests.support.repository.checkout import ROOT
from tftpu.launch import main
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.parsing import parse
from tftpu.version import __version__

BLOCKS = [block for page in doc_blocks.PAGES for block in doc_blocks.blocks(page) if block.reason]
COMMANDS = {
    command: block for block in BLOCKS if block.language == "bash" for command in block.commands
}
ELSEWHERE = (  # other programs, whose arguments cannot be checked here
    "pip uninstall -y tensorflow tensorflow-cpu",
    "pip install --no-deps keras-hub==0.32.0",
    "pip wheel --no-deps --wheel-dir=dist .",
    "docker run -p 8501:8501 ",
    "gcloud auth application-default login",
    "gcloud compute firewall-rules create ",
    "gcloud container clusters get-credentials ",
    "docker push ",
    "curl localhost:8080/",
    "curl -N localhost:8080/",
    "curl https://us-central1-aiplatform.googleapis.com/v1/projects/PROJECT/",
    "gcloud storage cp digits.onnx gs://BUCKET/",
    "tensorboard --logdir=",
    "kill -USR1 ",
    "sky jobs launch ",
)


@pytest.mark.medium
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command(command, tmp_path, monkeypatch, capsys):
    words = itertools.dropwhile(lambda word: word.startswith("TF_XLA_FLAGS="), shlex.split(command))
    name, *arguments = words
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    if name == "tftpu":
        monkeypatch.chdir(tmp_path)
        # A page may use the file of another one, to which it links.
        for page in (*doc_blocks.PAGES, COMMANDS[command].page):
            for block in doc_blocks.blocks(page):
                if block.title:
                    (tmp_path / block.title).write_text(block.text)
        check_tftpu(arguments)
        if "launch" in arguments:
            assert {"PROJECT", "JobSet"} & set(re.findall(r"\w+", capsys.readouterr().out))
    elif command.startswith("pip install ") and "[" in command:
        check_extras(arguments[-1])
    elif command.startswith("docker build "):
        check_image(arguments, capsys)
    elif command.startswith("python -m "):
        import importlib.util

        assert importlib.util.find_spec(arguments[1])
    else:
        assert command.startswith(ELSEWHERE), "no test covers this line"


def check_tftpu(arguments: list[str]) -> None:
    """Makes the request of a launch; trains two steps here; else parses the flags."""
    if arguments[0] == "launch":
        assert main.main([*arguments, "--dry_run"]) == 0
    elif arguments[0] == "doctor":
        assert main.main(arguments) == 0
    elif arguments[0] == "train":
        here = [word for word in arguments if not word.startswith("--workdir=gs://")]
        assert main.main([*here, "--config.train.steps=2", "--tpu=none"]) == 0
    else:
        check_flags(arguments)


def check_flags(arguments: list[str]) -> None:
    """Parses the words and the flags, and looks the fields up in the config."""
    commands = main.load_commands()
    name = next(n for n in (" ".join(arguments[:2]), arguments[0]) if n in commands)
    options = parse(name, commands[name].options, arguments[len(name.split()) :])
    if getattr(options, "overrides", ()):
        config_flags.load(options.config, list(options.overrides))


def check_extras(requirement: str) -> None:
    target, extras, source = re.fullmatch(r"(.+?)\[([\w,-]+)\](?: @ (.+))?", requirement).groups()
    target = source or target
    address = "git+https://HOST/OWNER/tftpu"
    assert target in (".", f"./tftpu-{__version__}-py3-none-any.whl", address)  # no index has it
    setup = (ROOT / "setup.py").read_text()
    assert all(re.search(rf'"{extra}": (\[|CPU)', setup) for extra in extras.split(","))


def check_image(arguments: list[str], capsys) -> None:
    values = dict(word[2:].split("=", 1) for word in arguments if word.startswith("--"))
    assert (ROOT / values["file"]).exists()
    assert f"docker push {values['tag']}" in COMMANDS
    for launch in (c for c in COMMANDS if c.startswith("tftpu launch vertex")):
        assert main.main([*shlex.split(launch)[1:], "--dry_run"]) == 0
    assert f"imageUri: {values['tag']}\n" in capsys.readouterr().out


def test_the_version_in_file_names_is_this_one():
    found = {version for c in COMMANDS for version in re.findall(r"tftpu[-:](\d[\w.]*\d)", c)}
    assert found == {__version__}
