"""Indexes of images, and lines of JSON, as strangers write them."""

import json
import os

import pytest

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.readers import text
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.reading import image_index, listing

LONG = "x" * 200_000


def index(folder, name: str, content: str) -> str:
    """Writes an index beside two images; returns its path."""
    for image in ("a.png", "b.png"):
        (folder / image).write_bytes(b"image")
    (folder / name).write_text(content)
    return str(folder / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            f'image,label\na.png,"{LONG}\n',
            "t.csv is not a valid table after line 2: unexpected end of",
        ),
        ("image,label\na.png,0\nb.png,-1\n", "line 3 of .* the label -1: a class id must be 0 or"),
        ("image,label\na.png,99999999999\n", "the label 99999999999: a class id must be 0 or more"),
        (
            f"image,label\na.png,{'9' * 5000}\n",
            "a class id must be 0 or more, and below 16,777,216",
        ),
        ("image,label\na.png,0\nb.png\n", "line 3 of .*t.csv has no 'label'"),
        ("image,label\n/etc/passwd,0\n", "no image /etc/passwd .* Paths are relative to"),
        ("image,label\n../a.png,0\n", r"no image \.\./a.png in .*\. Paths are relative to"),
    ],
)
def test_a_csv_that_cannot_be_used_is_one_clear_error(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        image_index.list_in_index(index(tmp_path, "t.csv", content))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"image": ["a.png"], "label": 0},
            "image must be a text, and label must be a text or a whole",
        ),
        (
            {"image": "a.png", "label": 1.5},
            "image must be a text, and label must be a text or a whole",
        ),
        (
            {"image": "a.png", "label": True},
            "image must be a text, and label must be a text or a whole",
        ),
        ({"image": "a.png", "label": -1}, "line 1 of .* the label -1"),
        ({"image": "a.png", "label": "\ud800"}, "line 1 of .*t.jsonl contains an unpaired surr"),
        ("[" * 100_000, "line 1 of .*t.jsonl is not JSON"),
    ],
)
def test_json_lines_that_cannot_be_used_are_one_clear_error(tmp_path, row, message):
    content = row if isinstance(row, str) else json.dumps(row)
    with pytest.raises(UserError, match=message) as error:
        image_index.list_in_index(index(tmp_path, "t.jsonl", content))
    assert str(error.value).encode()


def test_digits_of_other_scripts_are_names(tmp_path):
    found = image_index.list_in_index(index(tmp_path, "t.csv", "image,label\na.png,²\nb.png,٣\n"))
    assert found.class_names == ["²", "٣"]
    assert [image.label for image in found.images] == [0, 1]


def test_class_ids_are_read_from_both_formats(tmp_path):
    of_csv = image_index.list_in_index(index(tmp_path, "t.csv", "image,label\na.png,2\nb.png,0\n"))
    rows = ({"image": "a.png", "label": 2}, {"image": "b.png", "label": "0"})
    of_json = image_index.list_in_index(
        index(tmp_path, "t.jsonl", "\n".join(map(json.dumps, rows)))
    )
    assert of_csv == of_json
    assert [image.label for image in of_csv.images] == [2, 0] and of_csv.num_classes == 3


def test_half_a_character_in_a_document_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "whole"}\n{"text": "half \\ud83d"}\n')
    reader = text.TextReader(str(tmp_path / "a.jsonl"), ReadOptions(context=4))
    with pytest.raises(UserError, match=r"line 2 of .*a.jsonl contains an unpaired surrogate"):
        list(reader.read_examples(reader.parts[0]))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "\U0001f600"}))
    reader = text.TextReader(str(tmp_path / "a.jsonl"), ReadOptions(context=4))
    assert len(list(reader.read_examples(reader.parts[0]))) == 1


def test_pipes_and_dead_links_are_no_files(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to(tmp_path / "none")
    assert listing.list_sizes(str(tmp_path)) == {"a.txt": 4}
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(UserError, match=r"t.csv is not a regular file"):
        image_index.list_in_index(str(tmp_path / "t.csv"))


def test_nothing_is_listed_for_an_index_that_is_missing(monkeypatch):
    monkeypatch.setattr(listing, "scan_folder", lambda folder: pytest.fail(f"lists {folder}"))
    with pytest.raises(UserError, match=r"/nowhere\.csv cannot be read"):
        image_index.list_in_index("/nowhere.csv")
