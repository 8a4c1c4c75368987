"""Indexes of images: tables of any format, their class ids and names, and the classes of splits."""

import csv
import gzip
import io
import json
import logging
import re
from pathlib import Path

import pytest

from tests.support.data import data_sets
from tests.support.data.conversions import silent
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import converter, splits
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.reading import image_index
from tftpu.input_pipelines.sources import Augment, StreamedImages

LABELS = ["cat", "a, b", 'c "d"', "e\u2028f", "cat"]


def write(path: Path, labels: list, first: int = 0) -> Path:
    """Writes an index of pictures, of which number n shows the grey level n, as its suffix says."""
    path.parent.mkdir(exist_ok=True)
    rows = []
    for number, label in enumerate(labels, first):
        (path.parent / f"{number}.jpg").write_bytes(data_sets.picture(number))
        rows.append({"image": f"{number}.jpg", "label": label})
    suffix = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    file = io.StringIO(newline="")
    if suffix == "json":
        json.dump(rows, file)
    elif suffix in ("jsonl", "ndjson"):
        file.write("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    else:
        writer = csv.DictWriter(file, ["image", "label"], delimiter={"tsv": "\t"}.get(suffix, ","))
        writer.writeheader()
        writer.writerows(rows)
        file.write("\r\n,\r\n" if suffix == "csv" else "\r\n")
    data = file.getvalue().encode("utf-8-sig")
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize(
    "name", ["t.csv", "t.CSV", "t.csv.gz", "t.tsv", "t.jsonl", "t.NDJSON", "t.json", "t.JSON.gz"]
)
def test_each_format_gives_the_same_images(tmp_path, name):
    found = image_index.list_in_index(str(write(tmp_path / name, LABELS)))
    assert found.class_names == sorted(set(LABELS)) and found.num_classes == 4
    assert [Path(image.path).name for image in found.images] == [f"{n}.jpg" for n in range(5)]
    assert [found.class_names[image.label] for image in found.images] == LABELS
    assert image_index.find_index(str(tmp_path), "t") == str(tmp_path / name)


def test_names_are_read_as_they_are_meant(tmp_path):
    write(tmp_path / "t.csv", [0, 1])
    (tmp_path / "t.csv").write_text("id, image ,label\n7,./0.jpg, 3.0\n8,1.jpg,0 \n")
    found = image_index.list_in_index(str(tmp_path / "t.csv"))
    assert [image.label for image in found.images] == [3, 0] and found.class_names is None


@pytest.mark.parametrize(("name", "between"), [("t.csv", ", "), ("t.tsv", "\t ")])
def test_quotes_after_a_space_are_no_part_of_a_name(tmp_path, name, between):
    write(tmp_path / name, [0, 1])
    rows = ('"image"', '"label"'), ('"0.jpg"', '"cat, wild"'), ('"1.jpg"', '"dog"')
    (tmp_path / name).write_text("".join(f"{between.join(row)}\n" for row in rows))
    found = image_index.list_in_index(str(tmp_path / name))
    assert found.class_names == ["cat, wild", "dog"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "image,label\n0.jpg,Smith, John\n",
            "line 2 of .* has 3 values, but the table has 2 columns",
        ),
        ("image;label\n0.jpg;1\n", "t.csv is separated by ';', not by ','"),
        (
            'image,label\n0.jpg,"1\n1.jpg,1\n',
            "not a valid table after line 3: unexpected end of data",
        ),
        ("image,label\na\\0.jpg,1\n", "image a.0.jpg with Windows separators: .* here a/0.jpg"),
        ("image,label\n0.jpg, \n", "line 2 of .* has no 'label'"),
        ("label,image,label\n0.jpg,1,1\n", "several columns named 'label'"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(tmp_path, content, message):
    write(tmp_path / "t.csv", [0, 1])
    write(tmp_path / "a" / "t.csv", [0])
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(UserError, match=message):
        image_index.list_in_index(str(tmp_path / "t.csv"))


def test_class_ids_and_names_of_classes_are_an_error_that_says_which_to_leave_out(tmp_path):
    index = write(tmp_path / "t.csv", [0, 1])
    with pytest.raises(UserError, match="Class ids need no names: leave `classes` out"):
        image_index.list_in_index(str(index), ("cat", "dog"))


def settings(folder, num_classes: int, **changes) -> StreamedImages:
    data = StreamedImages(
        format="index",
        data_dir=str(folder),
        eval_split="val",
        num_classes=num_classes,
        image_size=8,
        image_dtype="uint8",
        global_batch_size=2,
        augment=Augment(crop=False, flip=False),
        **changes,
    )
    data.validate()
    return data


def labels_of(batches) -> dict[int, int]:
    """Returns the label of each picture, by its grey level."""
    return {
        round(float(image.mean())): int(label)
        for images, labels in batches.as_numpy_iterator()
        for image, label in zip(images, labels)
    }


@pytest.mark.slow
def test_a_split_may_lack_the_highest_class_id(tmp_path, caplog):
    write(tmp_path / "train.csv", [0, 4, 2])
    write(tmp_path / "val.ndjson", [3, 0], first=10)
    with pytest.raises(UserError, match=r"set data\.num_classes=5") as error:
        input_pipelines.training(settings(tmp_path, 4))
    [advice] = re.findall(r"num_classes=(\d+)\.", str(error.value))
    data = settings(tmp_path, int(advice))
    assert labels_of(input_pipelines.evaluation(data)) == {10: 3, 11: 0}
    assert input_pipelines.training(data).count == 3 and not caplog.records
    # Of the class with the highest id there may be no picture at all.
    with caplog.at_level(logging.WARNING):
        assert labels_of(input_pipelines.evaluation(settings(tmp_path, 7))) == {10: 3, 11: 0}
    assert "The highest class id in the split 'train' is 4, but" in caplog.text


@pytest.mark.medium
def test_a_class_id_that_the_model_does_not_have_is_named(tmp_path):
    write(tmp_path / "train.csv", [0, 4, 2])
    write(tmp_path / "val.csv", [5], first=10)
    with pytest.raises(
        UserError, match=r"line 2 of .*val.csv has the class id 5, but classes are numbered 0 to 4"
    ):
        input_pipelines.evaluation(settings(tmp_path, 5))
    assert labels_of(input_pipelines.evaluation(settings(tmp_path, 6))) == {10: 5}
    write(tmp_path / "val.csv", ["cat"], first=10)
    with pytest.raises(UserError, match=r"line 2 of .*val.csv has the label 'cat'"):
        input_pipelines.evaluation(settings(tmp_path, 5))


@pytest.mark.slow
def test_the_names_of_the_training_split_number_those_of_all_splits(tmp_path):
    write(tmp_path / "train.tsv", ["owl", "cat", "dog", "7"])
    write(tmp_path / "val.csv", ["owl", "7"], first=10)
    data = settings(tmp_path, 4)
    assert input_pipelines.class_names(data) == ["7", "cat", "dog", "owl"]
    assert labels_of(input_pipelines.evaluation(data)) == {10: 3, 11: 0}
    given = settings(tmp_path, 5, classes=("owl", "bat", "7", "dog", "cat"))
    assert labels_of(input_pipelines.evaluation(given)) == {10: 0, 11: 2}
    write(tmp_path / "val.csv", ["cow"], first=10)
    with pytest.raises(
        UserError, match=r"'cow', which is not one of the 4 classes.*7, cat, dog, owl"
    ):
        input_pipelines.evaluation(data)


def test_an_index_per_split_is_found_or_named(tmp_path):
    write(tmp_path / "val.csv", [0])
    with pytest.raises(
        UserError, match="no index for the split 'train': give the split a single table, such as tr"
    ):
        input_pipelines.training(settings(tmp_path, 1))
    write(tmp_path / "train.CSV", [0])
    write(tmp_path / "train.jsonl", [0])
    with pytest.raises(UserError, match=r"train\.CSV and train.jsonl for the split 'train'"):
        input_pipelines.training(settings(tmp_path, 1))


def test_a_conversion_takes_the_classes_that_are_given(tmp_path):
    write(tmp_path / "in" / "val.csv", [3, 0])

    def convert(output: str, **options):
        conversion = Conversion(
            f"index:{tmp_path}/in/val.csv", str(tmp_path / output), ReadOptions(**options)
        )
        return converter.run(conversion, 1, say=silent)

    assert convert("a").features["label"].num_classes == 4
    assert convert("b", num_classes=9).features["label"].num_classes == 9
    named = convert("c", classes=("3", "1", "0"))
    assert named.features["label"].num_classes == 3 and named.about["classes"] == ["3", "1", "0"]
    with pytest.raises(UserError, match="the class id 3, but classes are numbered 0 to 2"):
        convert("d", num_classes=3)
    with pytest.raises(UserError, match="num_classes works only with the sources index, tfrecord"):
        splits.plan_conversions(Conversion("text:a.txt", "out", ReadOptions(num_classes=3)))
