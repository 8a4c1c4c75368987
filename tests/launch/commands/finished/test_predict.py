"""`tftpu predict` on a small run of images."""

import csv
import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu.input_pipelines.datasets import small
from tftpu.input_pipelines.sources import Texts
from tftpu.input_pipelines.unlabelled import UnlabelledRecords
from tftpu.launch.commands.finished import predict
from tftpu.launch.main import main
from tftpu.launch.run import finished
from tftpu.launch.settings import config_flags


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    workdir = str(tmp_path_factory.mktemp("run"))
    steps = ("epochs=None", "steps=12", "steps_per_loop=6", "eval_every=12", "log_every=12")
    options = [f"--config.train.{option}" for option in steps]
    sizes = ["--config.optimizer.warmup_steps=1"]
    assert main(["train", "--config=digits_resnet", f"--workdir={workdir}", *sizes, *options]) == 0
    return workdir


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The evaluation images as files, in the order of the split."""
    pictures = tmp_path_factory.mktemp("scans")
    for number, image in enumerate(small.load_split("digits", None, "test")["image"][:50]):
        (pictures / f"{number:03d}.png").write_bytes(tf.io.encode_png(image).numpy())
    return pictures


def predicted(run: str, output: Path, *words: str) -> list[dict]:
    outputs = [f"--output={output}", "--outputs=classes,logits"]
    assert main(["predict", f"--workdir={run}", *outputs, *words]) == 0
    found = sorted(output.glob("predictions-*"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_files_are_predicted_as_the_split_that_they_come_from(run, folder, tmp_path, capsys):
    split = predicted(run, tmp_path / "split", "--input=evaluation", "--keep=label")
    assert main(["evaluate", f"--workdir={run}"]) == 0
    accuracy = float(capsys.readouterr().out.split()[-1])
    right = np.mean([row["class"] == row["label"] for row in split])
    assert right == pytest.approx(accuracy, abs=1e-4)
    assert all(row["label_name"] == str(row["label"]) for row in split)
    files = predicted(run, tmp_path / "files", f"--input=images:{folder}", "--batch_size=16")
    assert [row["file"] for row in files] == [f"{folder}/{n:03d}.png" for n in range(50)]
    assert [row["class_name"] for row in files] == [str(row["class"]) for row in split[:50]]
    for size in (1, 7, 100):  # which 16, the images that are prepared at a time, does not divide
        words = [f"--input=images:{folder}", f"--batch_size={size}", "--records_per_shard=20"]
        again = predicted(run, tmp_path / str(size), *words)
        assert [row["file"] for row in again] == [row["file"] for row in files]
    logits = [row["logits"] for row in split[:50]]
    np.testing.assert_allclose([row["logits"] for row in files], logits, atol=1e-5)


@pytest.mark.slow
def test_a_file_that_is_no_image_stops_or_is_named(run, folder, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for path in list(folder.iterdir())[:3]:
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "in" / "zz.png").write_text("no image")
    given = [f"--workdir={run}", f"--input=images:{tmp_path}/in", f"--output={tmp_path}/out"]
    assert main(["predict", *given]) == 2
    said = capsys.readouterr().err
    assert "zz.png is not an image that can be read" in said and "--skip_bad" in said
    assert "Traceback" not in said
    assert main(["predict", *given, "--skip_bad"]) == 0
    assert "\n3 predictions and 1 error in " in f"\n{capsys.readouterr().out}"
    assert main(["predict", *given, "--skip_bad"]) == 0  # it finds them there
    assert "\n4 rows in " in capsys.readouterr().out
    table = [f"--output={tmp_path}/csv", "--format=csv", "--skip_bad"]
    assert main(["predict", *given[:2], *table]) == 0
    *shown, error = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x[0] == "{"]
    with (tmp_path / "csv" / "predictions-00000-of-00001.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class_name"] for row in rows] == [*(row["class_name"] for row in shown), ""]
    assert rows[-1]["error"] == error["error"] and len(shown) == 3
    *good, bad = (tmp_path / "out" / "predictions-00000-of-00001.jsonl").read_text().splitlines()
    assert len(good) == 3 and all("class_name" in line for line in good)
    assert set(json.loads(bad)) == {"file", "error"}


@pytest.mark.slow
def test_a_classifier_writes_classes_unless_others_are_asked_for(run, folder, tmp_path, capsys):
    given = ["predict", run, f"--input=images:{folder}"]
    assert main([*given, f"--output={tmp_path}/one"]) == 0
    shard = tmp_path / "one" / "predictions-00000-of-00001.jsonl"
    said = capsys.readouterr().out
    assert f"50 predictions in {shard}\nThe predictions hold classes; --outputs chooses" in said
    assert "--keep=" not in said  # files of images have no fields
    row = json.loads(shard.read_text().splitlines()[0])
    assert list(row) == ["file", "class", "class_name", "probability"]
    words = ["--outputs=logits", "--records_per_shard=20"]
    assert main([*given, f"--output={tmp_path}/raw", *words]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"50 predictions in {tmp_path}/raw/predictions-*-of-00003.jsonl\n")
    row = json.loads(next((tmp_path / "raw").glob("*.jsonl")).read_text().splitlines()[0])
    assert list(row) == ["file", "logits"]


@pytest.mark.slow
def test_damaged_predictions_are_named_and_written_again(run, folder, tmp_path, capsys):
    given = ["predict", f"--workdir={run}", f"--input=images:{folder}", f"--output={tmp_path}/out"]
    given += ["--records_per_shard=20"]
    assert main([*given, "--verify"]) == 2
    assert "no manifest.json" in capsys.readouterr().err
    assert main(given) == 0
    assert main([*given, "--verify"]) == 0
    assert "are as they were written" in capsys.readouterr().out
    shard = tmp_path / "out" / "predictions-00001-of-00003.jsonl"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    assert main([*given, "--verify"]) == 2
    assert f"{shard.name} has 100 bytes, but {len(whole):,} were written" in capsys.readouterr().err
    assert shard.read_bytes() == whole[:100]
    assert main(given) == 0
    said = capsys.readouterr().err
    assert f"{tmp_path}/out has damaged files, which are written again: {shard.name}." in said
    assert shard.read_bytes() == whole
    assert main([*given, "--verify"]) == 0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input=picture:x"], "use images:..., evaluation, training"),
        (["--input=evalution"], "Did you mean 'evaluation'?"),
        (["--input=images:nowhere"], "There is no folder nowhere: name a folder of images"),
        (
            ["--input=sentence:A nice film"],
            "Data of the class Images cannot be read from the input",
        ),
        ([f"--input=images:{Path(__file__).parent}"], "There are no images (.jpg, "),
        (["--input=evaluation", "--keep=lable"], "The input has no field 'lable'"),
        (["--input=evaluation", "--outputs=class"], "Did you mean 'classes'?"),
        (["--input=evaluation", "--format=tsv"], "--format has no 'tsv'"),
        (["--input=evaluation", "--format=jsonl,parquet"], "--format has no 'jsonl,parquet'"),
        (["--input=evaluation", "--shard=3/2"], "must be K/N"),
        (["--input=evaluation", "--format=bigquery"], "must be given together"),
        (["--input=evaluation", "--format=bigquery", "--table=a"], "PROJECT.DATASET.TABLE"),
        (["--input=evaluation", "--format=bigquery", "--table=a.b.c"], "gs://BUCKET/FOLDER"),
        (["--input=evaluation", "--output=labels.jsonl"], "give a folder, --output=labels."),
        (["--input=evaluation", "--output=a.parquet"], "--output=a --format=parquet."),
        (["--input=evaluation", "--output=a.csv"], "--output=a --format=csv."),
        (["--input=evaluation", "--output=s3://x/y"], "--output=s3://x/y is not a folder"),
    ],
)
def test_a_mistake_is_explained(run, tmp_path, capsys, words, message):
    given = [f"--workdir={run}", f"--output={tmp_path}/out", *words]
    assert main(["predict", *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_interruption_says_how_to_continue(run, tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    words = ["predict", run, "--input=evaluation", f"--output={tmp_path}/out"]
    with monkeypatch.context() as patched:
        patched.setattr(predict.ProgressPrinter, "__call__", interrupt)
        assert main(words) == 130
    said = capsys.readouterr().err
    assert said.splitlines()[-1].endswith("The same command predicts the records that are missing.")
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input=new"], "Did you mean 'images:new'?"),
        (
            ["--input=images:nwe"],
            "There is no folder nwe: name a folder of images that exists. Did",
        ),
        (["--input=images:empty"], "There are no images (.jpg, "),
        (
            ["--input=evaluation", "--output=used"],
            "at step 5 of this or another run, not at step 7",
        ),
        (
            ["--input=images:new", "--keep=label"],
            "--keep=label: pictures in a folder have no fields",
        ),
        (["--input=images:new", "--output=used"], "already holds other predictions"),
        (["--input=evaluation", "--output=used", "--keep=label"], "the kept fields are none, not"),
    ],
)
def test_what_can_be_known_is_refused_before_tensorflow_is_loaded(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for folder in ("new", "used", "empty", "runs/a/checkpoints/7"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "new/a.png").touch()
    (tmp_path / "runs/a/checkpoints/7/manifest.json").write_text("{}")
    (tmp_path / "runs/a/checkpoints/best").write_text('{"step": 7, "metric": "loss", "value": 1.0}')
    (tmp_path / "used/plan.json").write_text(
        '{"input": "evaluation", "keep": [], "format": "jsonl", "step": 5}'
    )
    (tmp_path / "used/predictions-00000-of-00001.jsonl").touch()
    monkeypatch.setattr(finished, "check_exists", lambda workdir: None)
    monkeypatch.setattr(
        finished, "load_experiment", lambda *_: config_flags.load("digits_resnet", [])
    )
    monkeypatch.setattr(finished, "restore_for_records", None)
    assert main(["predict", "runs/a", "--output=out", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [([], "probability"), (["--outputs=top5"], "top5_names"), (["--outputs=logits"], "logits")],
)
def test_a_kept_field_with_the_name_of_a_column_is_refused_before_anything_is_predicted(
    words, name, monkeypatch, capsys, tmp_path
):
    def restore(options, changed):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        changed(model)
        records = UnlabelledRecords(1, "", list, range, ["id", name])
        return config_flags.load("digits_resnet", []), None, records

    monkeypatch.setattr(finished, "check_exists", lambda workdir: None)
    monkeypatch.setattr(predict, "_restore", restore)
    given = ["predict", "runs/a", f"--output={tmp_path}/out", "--input=evaluation", *words]
    assert main([*given, f"--keep=id,{name}"]) == 2
    said = capsys.readouterr().err
    assert f"The input's field {name!r} has the name of a column of the predictions" in said


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nowhere.csv", "There is no file 'nowhere.csv'"),
        ("A nice film", "give it instead of a file: --input='sentence:TEXT'"),
        ("a.csv", "a.csv has no field 'text'"),
    ],
)
def test_texts_that_cannot_be_used_are_refused_before_tensorflow_is_loaded(
    file, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("review\ngood\n")
    experiment = config_flags.load("digits_resnet", [])
    experiment.data = Texts(train_text="a.csv")
    monkeypatch.setattr(finished, "check_exists", lambda workdir: None)
    monkeypatch.setattr(finished, "load_experiment", lambda *_: experiment)
    monkeypatch.setattr(finished, "restore_for_records", None)
    assert main(["predict", "runs/a", "--output=out", f"--input=text:{file}"]) == 2
    assert message in capsys.readouterr().err
