"""`tftpu data convert` of folders of splits, of held-out shares, and of files that are damaged."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.data import photos
from tests.support.data.conversions import content, examples, one, silent
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import converter
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.formats import manifest
from tftpu.launch import main as command_line

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture
def folder(pictures, tmp_path) -> Path:
    """Returns a folder of splits: train with three classes, val with two, test with the last."""
    root = tmp_path / "photos"
    of_split = {"train": ["cat", "dog", "owl"], "val": ["cat", "dog"], "test": ["owl"]}
    for split, names in of_split.items():
        for name in names:
            shutil.copytree(pictures / name, root / split / name)
    return root


def convert(source: str, output: Path, *flags: str) -> int:
    arguments = [f"--source={source}", f"--output={output}", "--workers=1", *flags]
    return command_line.main(["data", "convert", *arguments])


def images(output: Path, split: str) -> dict[bytes, int]:
    """Returns the label of each image of a split."""
    return {one(e, "image"): one(e, "label") for shard in examples(output, split) for e in shard}


def files(folder: Path, **labels: int) -> dict[bytes, int]:
    """Returns the label of each file in a folder of classes."""
    return {p.read_bytes(): label for n, label in labels.items() for p in (folder / n).iterdir()}


@pytest.mark.medium
def test_a_folder_of_splits_is_converted_with_all_its_splits(folder, tmp_path):
    output = tmp_path / "out"
    assert convert(f"images:{folder}", output) == 0
    found = manifest.read(str(output))
    assert set(found.splits) == {"train", "val", "test"}
    assert found.about["classes"] == ["cat", "dog", "owl"]
    assert images(output, "train") == files(folder / "train", cat=0, dog=1, owl=2)
    assert images(output, "val") == files(folder / "val", cat=0, dog=1)
    # Its only class keeps the id that it has in the other splits.
    assert images(output, "test") == files(folder / "test", owl=2)
    before = content(output)
    assert convert(f"images:{folder}", output) == 0
    assert content(output) == before


def test_one_split_can_be_converted_by_its_own_folder(folder, tmp_path):
    assert convert(f"images:{folder}/val", tmp_path / "out", "--split=val") == 0
    assert set(manifest.read(str(tmp_path / "out")).splits) == {"val"}


def test_classes_that_are_named_like_a_split_stay_classes(pictures, tmp_path):
    shutil.copytree(pictures / "cat", tmp_path / "vehicles" / "train")
    shutil.copytree(pictures / "dog", tmp_path / "vehicles" / "car")
    assert convert(f"images:{tmp_path}/vehicles", tmp_path / "out") == 0
    assert manifest.read(str(tmp_path / "out")).about["classes"] == ["car", "train"]


def test_splits_without_classes_never_become_classes(pictures, tmp_path, capsys):
    for split in ("train", "test"):
        shutil.copytree(pictures / "cat", tmp_path / "flat" / split)
    assert convert(f"images:{tmp_path}/flat", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "are the splits test, train, but test/" in error
    assert "is not in a class's folder" in error


def test_a_conversion_in_python_is_told_of_splits_too(folder, tmp_path):
    with pytest.raises(UserError, match=r"are the splits test, train, val, not classes"):
        converter.run(Conversion(f"images:{folder}", str(tmp_path / "out")), 1, say=silent)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["images", "index"])
def test_a_share_of_each_class_is_held_out_for_validation(pictures, tmp_path, kind):
    source = f"images:{pictures}"
    if kind == "index":
        rows = [
            json.dumps({"image": str(p.relative_to(pictures)), "label": p.parent.name})
            for p in pictures.rglob("*.png")
        ]
        source = f"index:{pictures}/all.jsonl"
        (pictures / "all.jsonl").write_text("\n".join(rows))
    for name in ("one", "two"):
        assert convert(source, tmp_path / name, "--validation_fraction=0.2") == 0
    made = images(tmp_path / "one", "train"), images(tmp_path / "one", "validation")
    assert [[list(split.values()).count(n) for n in range(3)] for split in made] == [
        [16, 16, 16],
        [4, 4, 4],
    ]
    assert made[0] | made[1] == files(pictures, cat=0, dog=1, owl=2)  # all, once
    assert content(tmp_path / "one") == content(tmp_path / "two")
    if kind == "index":
        (pictures / "all.jsonl").unlink()


@pytest.mark.medium
def test_a_share_is_held_out_of_the_training_split_of_a_folder(folder, tmp_path, capsys):
    assert convert(f"images:{folder}", tmp_path / "no", "--validation_fraction=0.1") == 2
    assert "no validation split" in capsys.readouterr().err
    shutil.rmtree(folder / "val")
    assert convert(f"images:{folder}", tmp_path / "out", "--validation_fraction=0.1") == 0
    said = capsys.readouterr().out
    assert " --config.data.eval_split=validation\n" in said
    written = f'format="tfrecord", data_dir="{tmp_path}/out", eval_split="validation"'
    assert f"StreamedImages({written}, ...)" in said
    assert convert(f"images:{folder}", tmp_path / "out", "--validation_fraction=0.1") == 0
    assert f"The split 'train' of {tmp_path}/out is already complete." in capsys.readouterr().out
    found = manifest.read(str(tmp_path / "out"))
    counts = {split: found.count_examples(split) for split in found.splits}
    assert counts == {"train": 54, "validation": 6, "test": 20}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--source=images:{}", "--split=train"], "leave out --split"),
        (["--source=images:{}/train", "--validation_fraction=1.5"], "must be in [0, 1)"),
        (["--source=text:x/*.txt", "--validation_fraction=0.1"], "--split=validation=train[90%:]"),
        (["--source=tfds:digits", "--skip_bad"], "work only with the sources images and index"),
        (
            ["--source=images:{}/train", "--skip_bad", "--runner=DirectRunner"],
            "does not work with a runner",
        ),
    ],
)
def test_a_flag_that_does_not_apply_is_an_error(folder, tmp_path, capsys, flags, sentence):
    flags = [flag.format(folder) for flag in flags]
    assert command_line.main(["data", "convert", f"--output={tmp_path}/out", *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.fixture
def damaged(pictures, tmp_path) -> Path:
    """Returns a folder of classes in which two of 62 files cannot be decoded."""
    root = tmp_path / "damaged"
    shutil.copytree(pictures, root)
    whole = photos.encoded(photos.pixels(64, 64))
    (root / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "dog" / "text.png").write_bytes(b"<html>not found</html>")
    return root


@pytest.mark.parametrize("kept", ["cut.jpg", "text.png"])
def test_a_file_that_cannot_be_decoded_ends_the_conversion(damaged, tmp_path, capsys, kept):
    for path in (damaged / "cat" / "cut.jpg", damaged / "dog" / "text.png"):
        if path.name != kept:
            path.unlink()
    assert convert(f"images:{damaged}", tmp_path / "out") == 2
    error = capsys.readouterr().err
    why = {"cut.jpg": "cannot be decoded (", "text.png": "is not an image that can be read ("}[kept]
    assert f"/{kept} {why}" in error
    assert "--skip_bad" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "dataset.json").exists()


@pytest.mark.medium
def test_bad_files_are_left_out_and_listed(damaged, pictures, tmp_path, capsys):
    assert convert(f"images:{damaged}", tmp_path / "out", "--skip_bad") == 0
    said = capsys.readouterr().out
    assert "Left out 2 files" in said
    assert "  cat/cut.jpg cannot be decoded (" in said
    assert "  dog/text.png is not an image that can be read (JPEG, PNG, " in said
    assert images(tmp_path / "out", "train") == files(pictures, cat=0, dog=1, owl=2)
    made = manifest.read(str(tmp_path / "out"))
    assert made.about["skipped"] == {"train": ["cat/cut.jpg", "dog/text.png"]}
    assert command_line.main(["data", "verify", str(tmp_path / "out"), "--workers=1"]) == 0
