"""Mistaken command lines: each answer names a line, and that line is one that runs."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tftpu.errors import UserError
from tftpu.launch import correction, main
from tftpu.launch.settings.options import ConfigOptions
from tftpu.launch.settings.parsing import HELP, parse

_TEXT = (Path(__file__).parent / "mistaken_lines.txt").read_text()
LINES = re.findall(r"^(.+)\n    (.+)$", _TEXT, re.MULTILINE)


@pytest.fixture
def _folders(tmp_path, monkeypatch):
    """Changes to a folder with a run, with pictures, and with an exported model."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/digits_resnet", "photos/train/cat", "saved"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/digits_resnet/goodput.json", "saved/saved_model.pb"):
        (tmp_path / name).touch()


@pytest.mark.usefixtures("_folders")
@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_a_mistake_is_answered_by_a_line_that_runs(line, expected, capsys):
    assert main.main(shlex.split(line)) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].split(": tftpu ")[1] == expected
    assert said[-1].startswith(("Type: ", "For example: "))
    _check(shlex.split(expected))


def _check(words):
    """Parses a line, and loads its config: what a command does before its work."""
    if words[-1] in HELP:
        assert main.main(words) == 0
        return
    commands = main.load_commands()
    name = " ".join(words[:2]) if " ".join(words[:2]) in commands else words[0]
    options = parse(name, commands[name].options, words[len(name.split()) :])
    if isinstance(options, ConfigOptions):
        options.load_experiment()


def test_an_example_names_the_newest_runs_that_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def say(*words: str) -> str:
        assert main.main(words) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert say("status") == "For example: tftpu status runs/digits_resnet"
    for age, name in enumerate(("c", "b", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "goodput.json").touch()
        os.utime(tmp_path / "runs" / name / "goodput.json", (age, age))
    assert say("status") == "For example: tftpu status runs/a runs/b"
    assert say("plot", "--log").startswith("For example: tftpu plot runs/a runs/b --log")
    assert say("evaluate") == "For example: tftpu evaluate runs/a"
    assert say("predict", "runs/b").startswith("For example: tftpu predict runs/b --input=")


def test_there_are_as_many_lines_as_promised():
    assert len(LINES) >= 60


def test_a_line_that_would_fail_again_is_not_suggested(capsys):
    assert main.main(["trian", "digits_resnet", "--config.train.steps=many"]) == 2
    assert "Type:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "r", "--field=a"],
        ["evaluate", "r", "--checkpoint=6"],
        ["predict", "r", "--lr=1"],
    ],
)
def test_no_field_of_a_config_is_suggested_for_a_run(words, capsys):
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert "Allowed: " in said and "--config." not in said
    assert main.main(["train", "x.py", "--field=a"]) == 2
    assert "base_fields" not in capsys.readouterr().err


def test_missing_data_are_answered_with_fields_where_there_is_a_config(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for words in (
        ["data", "verify", "empty"],
        ["data", "convert", "tfrecord:empty:train", "--output=out"],
        ["data", "convert", "images:nothing", "--output=out"],
    ):
        assert main.main(words) == 2
        said = capsys.readouterr().err
        assert "empty" in said or "nothing" in said
        assert "--config" not in said
    flags = ["--config.data.format=tfrecord", "--config.data.data_dir=empty"]
    assert main.main(["data", "check", "resnet50_imagenet", *flags]) == 2
    assert capsys.readouterr().err.rstrip().endswith("--config.data.data_dir=FOLDER.")


def test_the_advice_on_fields_is_one_sentence():
    found = correction.leave_fields_out("No x. In a config: --config.data.data_dir=FOLDER. Next.")
    assert found == "No x. Next."
    both = "No x. In a config, set it: --config.data.a_split=b or --config.data.b_split=b."
    assert correction.leave_fields_out(both) == "No x."


def test_a_checkpoint_is_answered_with_its_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets" / "checkpoints" / "30").mkdir(parents=True)
    (tmp_path / "pets" / "config.json").touch()
    assert main.main(["status", "pets/checkpoints/30"]) == 2
    assert "Did you mean 'pets'?" in capsys.readouterr().err


def test_the_config_of_another_tool_is_not_taken_for_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").touch()
    (tmp_path / "runs" / "pets").mkdir(parents=True)
    assert correction.suggest_folder("runs/petts") == " Did you mean 'runs/pets'?"


def test_a_folder_of_runs_is_answered_with_its_newest_where_a_command_takes_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("pets", "birds", "no_run")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if name != "no_run":
            (tmp_path / "runs" / name / "goodput.json").touch()
            os.utime(tmp_path / "runs" / name / "goodput.json", (1e9 - age, 1e9 - age))
    assert main.main(["evaluate", "runs/"]) == 2
    said = capsys.readouterr().err
    assert "It holds the runs runs/birds, runs/pets." in said
    assert "Type: tftpu evaluate runs/pets\n" in said  # the newest


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train mine.p", "train mine.py"),
        ("data convert text:tales.tx --output=tales", "data convert text:tales.txt --output=tales"),
        ("data convert text:old.tx --output=old", ""),
    ],
)
def test_a_misspelt_ending_is_corrected_by_a_file_that_the_command_reads(
    line, expected, in_scratch_project, tmp_path, capsys
):
    for name in ("tales", "old", "runs/mine"):  # what earlier commands wrote
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tales.txt").write_text("Once upon a time.")
    (tmp_path / "mine.py").write_text("from tftpu.launch.configs.python_gpt import get_config\n")
    (tmp_path / "mine.pdf").touch()
    assert main.main(line.split()) == 2
    assert re.findall("Type: tftpu (.*)", capsys.readouterr().err) == [expected] * bool(expected)


@pytest.mark.parametrize(
    ("folder", "kind"), [("new", "images"), ("shards", "tfrecord")], ids=["images", "converted"]
)
def test_a_folder_that_is_to_be_predicted_gets_its_kind(folder, kind, tmp_path, monkeypatch):
    from tftpu.input_pipelines import addresses

    monkeypatch.chdir(tmp_path)
    for name in ("new/1.png", "shards/dataset.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    with pytest.raises(UserError) as error:
        addresses.parse_address(folder, "StreamedImages", ("images", "tfrecord"))
    words = ["predict", "runs/a", f"--input={folder}", "--output=out"]
    corrected = [*words[:2], f"--input={kind}:{folder}", "--output=out"]
    assert correction.correct(words, str(error.value)) == corrected


def test_a_folder_of_pictures_with_a_misspelt_name_is_corrected(tmp_path, monkeypatch):
    from tftpu.input_pipelines.reading import image_files

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets/train/cat").mkdir(parents=True)
    (tmp_path / "pets/train/cat/1.png").touch()
    words = ["train", "photos.py", "--config.data.data_dir={}"]
    for mistaken, sought in ("pest", "pest/train"), ("pets/trian", "pets/trian"):
        with pytest.raises(UserError) as error:
            image_files.sort_files(sought)
        given = [*words[:2], words[2].format(mistaken)]
        meant = {"pest": "pets", "pets/trian": "pets/train"}[mistaken]
        assert correction.correct(given, str(error.value)) == [*words[:2], words[2].format(meant)]


def test_names_of_other_tools_are_those_of_commands_and_fields():
    commands = main.load_commands()
    assert {*correction.SYNONYMS.values()} <= {*commands}
    assert not {*correction.SYNONYMS} & {*commands}


def test_a_whole_value_is_corrected_before_a_part_of_another():
    message = "The input 'photos' cannot be read. Did you mean 'images:photos'?"
    words = ["predict", "runs/photos", "--input=photos"]
    assert correction.correct(words, message) == [*words[:2], "--input=images:photos"]


def test_commas_separate_runs_as_spaces_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").mkdir()
    given = ["x,y", "a,b", "z", ",", "gs://b/r,1"]
    assert correction.expand_folders(given) == ["x", "y", *given[1:]]
