"""The first split fixes what a data set is made of: classes, features, tokenizer, options."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from tests.support.data import data_sets
from tests.support.data.conversions import content, examples, one, silent
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import converter, publishing
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.formats import manifest
from tftpu.launch import main as command_line


def photos(folder: Path, *classes: str) -> str:
    """Writes an image of each class; returns the source."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        picture = data_sets.picture(number, kind="PNG")
        (folder / name / f"{folder.name}-{name}.png").write_bytes(picture)
    return f"images:{folder}"


def index(folder: Path, name: str, *labels: object) -> str:
    """Writes an index of images with these labels; returns the source."""
    rows = []
    for label in labels:
        (folder / f"{name}-{label}.png").write_bytes(data_sets.picture(1, kind="PNG"))
        rows.append(json.dumps({"image": f"{name}-{label}.png", "label": label}))
    (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return f"index:{folder}/{name}.jsonl"


def convert(source: str, output: Path, split: str = "train", **options) -> None:
    conversion = Conversion(source, str(output), ReadOptions(split=split, **options))
    converter.run(conversion, workers=1, say=silent)


def classes_of(output: Path, split: str) -> dict[bytes, str | int]:
    """Returns the class of each file of a split, by its name if it has one."""
    names = manifest.read(str(output)).about.get("classes")
    made = [example for shard in examples(output, split) for example in shard]
    labels = {one(e, "source"): one(e, "label") for e in made}
    return {file: names[label] if names else label for file, label in labels.items()}


def test_a_later_split_of_other_classes_is_refused_and_changes_nothing(tmp_path, capsys):
    output = tmp_path / "out"
    convert(photos(tmp_path / "train", "cat", "dog"), output)
    before = content(output)
    source = photos(tmp_path / "val", "dog", "horse")
    flags = [f"--source={source}", f"--output={output}", "--split=val", "--workers=1"]
    assert command_line.main(["data", "convert", *flags]) == 2
    error = capsys.readouterr().err
    assert (
        "the folders horse, which are not among the classes of the run or the first split: cat, dog"
        in error
    )
    assert "all splits into another folder" in error and error.count("\n") == 1
    assert content(output) == before


@pytest.mark.parametrize("kind", ["folders", "index"])
def test_a_later_split_that_lacks_classes_has_the_ids_of_the_first(tmp_path, kind):
    output = tmp_path / "out"
    if kind == "folders":
        sources = photos(tmp_path / "train", "ant", "cat", "dog"), photos(tmp_path / "val", "dog")
    else:
        sources = index(tmp_path, "train", "ant", "cat", "dog"), index(tmp_path, "val", "dog")
    convert(sources[0], output)
    convert(sources[1], output, "val")
    assert set(classes_of(output, "val").values()) == {"dog"}
    assert manifest.read(str(output)).about["classes"] == ["ant", "cat", "dog"]
    before = content(output)
    for source, split in zip(sources, ("train", "val")):  # again: both are complete
        convert(source, output, split)
    assert content(output) == before


def test_a_later_index_of_class_ids_may_lack_the_highest_and_has_none_above(tmp_path):
    output = tmp_path / "out"
    convert(index(tmp_path, "train", 0, 1, 3), output)
    convert(index(tmp_path, "val", 1), output, "val")
    assert list(classes_of(output, "val").values()) == [1]
    assert manifest.read(str(output)).features["label"].num_classes == 4
    with pytest.raises(UserError, match=r"num_classes|4 classes"):
        convert(index(tmp_path, "test", 4), output, "test")


def test_names_and_ids_do_not_mix(tmp_path):
    convert(photos(tmp_path / "train", "cat", "dog"), tmp_path / "out")
    with pytest.raises(UserError, match=r"0"):
        convert(index(tmp_path, "val", 0, 1), tmp_path / "out", "val")
    convert(index(tmp_path, "ids", 0, 1), tmp_path / "ids")
    with pytest.raises(UserError, match=r"classes is None there, and \['cat', 'dog'\] here"):
        convert(f"images:{tmp_path}/train", tmp_path / "ids", "val")


def test_splits_that_are_converted_at_the_same_time_do_not_differ_either(tmp_path, monkeypatch):
    """The second one was read before the first one was published."""
    output = tmp_path / "out"
    late = publishing.publish

    def publish(*arguments):
        monkeypatch.setattr(publishing, "publish", late)
        convert(photos(tmp_path / "val", "dog"), output, "val")
        return late(*arguments)

    monkeypatch.setattr(publishing, "publish", publish)
    with pytest.raises(UserError, match=r"classes is \['dog'\] there, and \['cat', 'dog'\] here"):
        convert(photos(tmp_path / "train", "cat", "dog"), output)
    assert set(manifest.read(str(output)).splits) == {"val"}


def tokenizer(folder: Path, *words: str) -> str:
    folder.mkdir()
    model = tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, words[0])
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "other"}, "tokenizer_crc32c is "),
        ({"tokenizer": None}, "tokenizer is tokenizer.json there, and bytes here"),
        ({"end_of_text": "b"}, "end_of_text is a there, and b here"),
        ({"context": 3}, "context is 4 there, and 3 here"),
    ],
)
def test_a_later_split_of_text_has_the_same_tokenizer_and_options(tmp_path, changes, message):
    (tmp_path / "a.txt").write_text("a b c a")
    source, output = f"text:{tmp_path}/a.txt", tmp_path / "out"
    # Two of one name and one size.
    files = {"one": tokenizer(tmp_path / "one", "a", "b", "c")}
    files["other"] = tokenizer(tmp_path / "other", "c", "b", "a")
    options = {"context": 4, "tokenizer": files["one"], "end_of_text": "a"}
    convert(source, output, **options)
    other = {**options, **changes, "tokenizer": files.get(changes.get("tokenizer", "one"))}
    other["end_of_text"] = other["tokenizer"] and other["end_of_text"]
    with pytest.raises(UserError, match=message):
        convert(source, output, "val", **other)
    renamed = shutil.copy(files["one"], tmp_path / "renamed.json")
    convert(source, output, "val", **{**options, "tokenizer": str(renamed)})
    assert set(manifest.read(str(output)).splits) == {"train", "val"}
