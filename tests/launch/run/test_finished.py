"""The checkpoint that commands of a finished run restore."""

import dataclasses
import json

import pytest

from tftpu.config import to_json
from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import streamed_images
from tftpu.input_pipelines.sources import StreamedImages
from tftpu.launch.run import finished, training
from tftpu.launch.settings import config_flags
from tftpu.storage import files


@pytest.mark.parametrize(
    ("restored", "newest", "said"),
    [(5, 9, "Step 5 of 9 is the best by loss"), (9, 9, ""), (5, 5, "")],
)
def test_a_checkpoint_that_is_not_the_newest_is_explained(restored, newest, said, tmp_path, capsys):
    for step in {5, newest}:
        files.write_whole(tmp_path / f"checkpoints/{step}/manifest.json", b"{}")
    best = {"step": 5, "metric": "loss", "value": 0.5}
    files.write_whole(tmp_path / "checkpoints/best", json.dumps(best).encode())
    finished._report_best(restored, str(tmp_path))
    printed = capsys.readouterr().err
    assert printed.startswith(said) and bool(printed) == bool(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("m.onnx", "--model={path}"),
        ("m.keras", "--output=NAME.onnx"),
        ("m.tflite", "for a SavedModel"),
    ],
)
def test_an_export_in_place_of_a_run_is_said(name, said, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(UserError) as refused:
        finished.check_no_export(str(path))
    assert said.format(path=path) in str(refused.value)


def test_a_preset_in_place_of_a_run_is_said(tmp_path):
    for name in ("config.json", "task.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"is a preset of KerasHub, not a run: .*--base"):
        finished.check_exists(str(tmp_path))


def test_a_run_in_place_of_a_config_has_its_own_settings(tmp_path):
    run = tmp_path / "elsewhere"
    experiment = config_flags.load("digits_resnet", ["--config.data.global_batch_size=96"])
    experiment.train.steps, experiment.train.epochs = 7, None
    files.write_whole(run / "config.json", to_json(experiment).encode())
    files.write_whole(run / "goodput.json", b"{}")
    priced = finished.ConfigOrRunOptions(config=f"{run}/", overrides=("--config.train.seed=5",))
    found = priced.load_experiment()
    assert (found.data.global_batch_size, found.train.steps, found.train.seed) == (96, 7, 5)
    assert (priced.name, priced.default_workdir) == ("elsewhere", f"{run}/")
    with pytest.raises(UserError, match="no field 'seeds'"):
        dataclasses.replace(priced, overrides=("--config.train.seeds=5",)).load_experiment()


def test_a_finished_run_numbers_its_classes_as_it_did_in_training(tmp_path):
    data = StreamedImages(format="folder", data_dir=str(tmp_path / "photos"), num_classes=2)
    for name in ("train/bird", "train/cat"):
        files.write_whole(tmp_path / "photos" / name / "a.png", b"")
    experiment = config_flags.load("digits_resnet", [])
    experiment.data = data
    files.write_whole(tmp_path / "config.json", to_json(experiment).encode())
    known = training._find_classes(data, "")
    files.write_whole(tmp_path / "data.json", json.dumps({"examples": 2, **known}).encode())
    (tmp_path / "photos/train/bird").rename(tmp_path / "photos/train/dove")
    assert finished.read_class_names(experiment) == ["cat", "dove"]
    found = finished.load_experiment(str(tmp_path))
    assert finished.read_class_names(found) == ["bird", "cat"]
    # A start of the run that is resumed lists nothing again.
    assert training._find_classes(data, str(tmp_path)) == known == {"classes": ["bird", "cat"]}
    assert training._find_classes(data, "") == {"classes": ["cat", "dove"]}  # it begins anew
    with pytest.raises(UserError, match=r"has the folders dove, which are not .*: bird, cat\. Rem"):
        streamed_images.list_split(found.data, "train")
