"""Indexes, texts and TFRecords as others write them: each record is read right, or named.

What is read is compared with the rows that were drawn and, where a file was damaged, with a reader
made here of Python's csv and json alone.
"""

import csv
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tests.support.data.data_sets import picture
from tests.support.hostile.fuzzing import damaged, fuzzed, only_user_errors
from tftpu.errors import UserError
from tftpu.input_pipelines.convert.readers import text
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.convert.readers.tfrecord_shards import ImageRecordReader
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.reading import image_index

SUFFIXES = ("csv", "tsv", "jsonl", "ndjson", "json", "lines.json")
NAMES = ("a.png", "b/c.jpg", "d, e.png", 'f"g".png', "ä ü.png")
# Of names and texts: with all that a format might take for its own.
ODD = st.text(alphabet="ab0 ,;\"'\t\n\r\u2028\x85\x0c\ufeffé\U0001f600", max_size=8)


@st.composite
def file_of_rows(draw, rows: st.SearchStrategy) -> tuple[str, bytes, list[dict]]:
    """Draws a table: its name, its content, and the rows that it holds."""
    kind = draw(st.sampled_from(SUFFIXES))
    drawn = draw(rows)
    end = draw(st.sampled_from(("\n", "\r\n") if "json" in kind else ("\n", "\r\n", "\r")))
    blank = draw(st.sampled_from(("", end, end * 3)))
    if kind == "json":
        content = json.dumps(drawn, indent=draw(st.sampled_from((None, 2))))
    elif "json" in kind:
        lines = [json.dumps(row, ensure_ascii=draw(st.booleans())) for row in drawn]
        content = blank + (end + blank).join(lines) + draw(st.sampled_from(("", end)))
    else:
        file = io.StringIO(newline="")
        columns = draw(st.permutations(list(drawn[0])))
        delimiter = "\t" if kind == "tsv" else ","
        values = "".join(str(value) for row in drawn for value in row.values())
        plain = not {"\n", "\r"} & {*values} and draw(st.booleans())
        writer = csv.DictWriter(
            file,
            columns,
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if plain else csv.QUOTE_ALL,
            lineterminator=end + blank,
        )
        writer.writeheader()
        writer.writerows(drawn)
        content = blank + file.getvalue() + draw(st.sampled_from(("", delimiter + end)))
    data = draw(st.sampled_from((b"", b"\xef\xbb\xbf"))) + content.encode()
    ending = kind.rpartition(".")[2]
    suffix = "".join(draw(st.sampled_from((c.lower(), c.upper()))) for c in ending)
    packed, named = draw(st.booleans()), draw(st.booleans())
    name = f"t.{suffix}{'.gz' if packed and named else ''}"
    return name, gzip.compress(data) if packed else data, drawn


def rows_by_csv_and_json(name: str, data: bytes) -> list[dict]:
    """Reads a table by Python's csv and json."""
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    content = data.decode("utf-8-sig")
    suffix = name.lower().removesuffix(".gz").rpartition(".")[2]
    if suffix in ("csv", "tsv"):
        delimiter = "\t" if suffix == "tsv" else ","
        lines = io.StringIO(content, newline="")
        table = [r for r in csv.reader(lines, delimiter=delimiter) if any(v.strip() for v in r)]
        return [dict(zip([name.strip() for name in table[0]], row)) for row in table[1:]]
    try:
        found = json.loads(content)
    except ValueError:
        lines = [line.removeprefix("\ufeff") for line in content.split("\n")]
        return [json.loads(line) for line in lines if line.strip()]
    return found if isinstance(found, list) else [found]


def index_rows(labels: st.SearchStrategy) -> st.SearchStrategy:
    row = st.fixed_dictionaries({"image": st.sampled_from(NAMES), "label": labels, "note": ODD})
    return st.lists(row, min_size=1, max_size=6)


IDS = st.sampled_from((0, 1, 2, 7, 40, 999))
LABELS = st.one_of(IDS, IDS.map(str), ODD.filter(str.strip).map(str.strip))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"image")
    return tmp_path / "in"


def write(folder: Path, name: str, content: bytes) -> str:
    for old in folder.glob("t.*"):
        old.unlink()
    (folder / name).write_bytes(content)
    return str(folder / name)


def check_index(folder: Path, found: Any, rows: list[dict]) -> None:
    """Compares an index with its rows: each image, and its label by name or by class id."""
    images = [os.path.relpath(image.path, folder) for image in found.images]
    assert images == [os.path.normpath(row["image"]) for row in rows]
    for image, row in zip(found.images, rows):
        label = str(row["label"]).strip()
        if found.class_names:
            assert found.class_names[image.label] == label
        else:
            assert image.label == float(label) and image.label < found.num_classes


@pytest.mark.medium
@fuzzed(80, file=file_of_rows(index_rows(IDS) | index_rows(LABELS)))
def test_each_row_of_an_index(folder, file):
    name, content, rows = file
    path = write(folder, name, content)
    check_index(folder, image_index.list_in_index(path), rows)
    assert image_index.find_index(str(folder), "t") == path


@fuzzed(50, file=file_of_rows(index_rows(IDS)), classes=st.integers(1, 1000))
def test_class_ids_of_a_later_split(folder, file, classes):
    """With a number of classes each id below it is right, and the first above it is named."""
    name, content, rows = file
    path = write(folder, name, content)
    above = [row for row in rows if int(row["label"]) >= classes]
    try:
        found = image_index.list_in_index(path, num_classes=classes)
    except UserError as error:
        assert above and f"class id {above[0]['label']}, " in str(error) and path in str(error)
    else:
        assert not above and found.num_classes == classes
        check_index(folder, found, rows)


@st.composite
def damaged_file(draw, rows: st.SearchStrategy) -> tuple[str, bytes]:
    name, content, _ = draw(file_of_rows(rows))
    if draw(st.booleans()) and content.startswith(b"\x1f\x8b"):
        return name, gzip.compress(draw(damaged(gzip.decompress(content))))
    return name, draw(damaged(content))


@pytest.mark.medium
@fuzzed(80, file=damaged_file(index_rows(LABELS)))
def test_a_damaged_index(folder, file):
    name, content = file
    path = write(folder, name, content)
    with only_user_errors():
        try:
            found = image_index.list_in_index(path)
        except UserError as error:
            assert path in str(error)
            raise
        check_index(folder, found, rows_by_csv_and_json(name, content))


TEXTS = st.lists(st.fixed_dictionaries({"id": IDS, "text": ODD}), min_size=1, max_size=6)
NO_TEXT = (
    ("a.txt", "x".encode("utf-16")),
    ("a.md", "é".encode("latin-1")),
    ("b.txt", b"\0\1\2"),
    ("a.jsonl", b'{"id": 1}\n'),
    ("a.JSON", b'{"text": ["a"]}'),
    ("a.CSV", b"id,body\n1,a\n"),
    ("a.tsv", b'text\n"a\n'),
    ("a.ipynb", b'{\n "cells": []}'),
    ("a.parquet", b"PAR1\x15\x04\x15\x00\xff"),
    ("a.txt.gz", gzip.compress(b"x" * 99)[:-4]),
)


@st.composite
def corpus(draw) -> tuple[dict[str, bytes], list[str]]:
    """Draws files, in order of their names, and the texts that they hold."""
    files, texts = {}, []
    for number in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            name, content, rows = draw(file_of_rows(TEXTS))
            files[f"{number}{name}"] = content
            texts += [row["text"] for row in rows]
            continue
        # No JSON: it begins with a word.
        document = draw(st.lists(ODD.map(lambda t: t.replace("\r", "")), max_size=4))
        document = "".join(f"word {line}\n" for line in document)
        encoded = document.replace("\n", draw(st.sampled_from(("\n", "\r\n")))).encode()
        encoded = draw(st.sampled_from((b"", b"\xef\xbb\xbf"))) + encoded
        name = draw(st.sampled_from((".txt", ".MD", "", ".txt.gz")))
        files[f"{number}t{name}"] = gzip.compress(encoded) if "gz" in name else encoded
        texts += [document] if files[f"{number}t{name}"] else []  # no bytes are no document
    return files, texts


def read_texts(folder: Path, files: dict[str, bytes]) -> list[str]:
    for old in folder.iterdir():
        old.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    reader = text.TextReader(f"{folder}/*", ReadOptions(context=4))
    return [t for part in reader.parts for piece in part for t in reader._read(*piece)]


@fuzzed(60, drawn=corpus(), hidden=st.booleans())
def test_each_text(tmp_path, drawn, hidden):
    files, texts = drawn
    every = {**files, **({".DS_Store": b"\0"} if hidden else {})}
    if any(files.values()):
        assert read_texts(tmp_path, every) == texts
    else:
        with pytest.raises(UserError, match=r"There is nothing in text:.*: name others"):
            read_texts(tmp_path, every)


@fuzzed(30, drawn=corpus(), bad=st.sampled_from(NO_TEXT))
def test_what_is_no_text_is_named(tmp_path, drawn, bad):
    name, content = bad
    with pytest.raises(UserError) as error:
        read_texts(tmp_path, {**drawn[0], name: content})
    assert f"{tmp_path}/{name}" in str(error.value)


@fuzzed(60, file=damaged_file(TEXTS))
def test_damaged_texts(tmp_path, file):
    name, content = file
    with only_user_errors():
        try:
            found = read_texts(tmp_path, {name: content})
        except UserError as error:
            assert name in str(error)
            raise
        rows = rows_by_csv_and_json(name, content) if content else []
        assert found == [row["text"] for row in rows]


FEATURES = ("image", "label", "class", "image/encoded", "image/class/label", "a b:c", "ü,")
CLASSES = ("cat", "a, b", 'c"d"', "é")
PICTURES = [picture(n) for n in range(4)]


@st.composite
def record_files(draw) -> tuple[dict[str, list[dict]], dict, str]:
    """Draws the records of each file, what describes them, and the files' compression."""
    image, label = draw(st.permutations(FEATURES))[:2]
    texts, first = draw(st.booleans()), draw(st.sampled_from((0, 1, 5)))
    ids = st.integers(0, len(CLASSES) - 1)
    labels = ids.map(lambda n: CLASSES[n].encode()) if texts else ids.map(lambda n: n + first)
    bad = st.sampled_from((None, b"cow", -1, 99, [0, 1], 0.5))  # None: without a label
    odd = draw(st.integers(0, 3)) == 0
    row = st.fixed_dictionaries(
        {image: st.sampled_from(PICTURES), label: labels | bad if odd else labels},
        optional={"height": ids, "boxes": st.lists(st.just(0.5), max_size=3)},
    )
    layout = draw(st.sampled_from(("train-{}", "train/{}.tfrec")))
    count = draw(st.integers(1, 2))
    files = {layout.format(n): draw(st.lists(row, min_size=1, max_size=4)) for n in range(count)}
    described = {"image_feature": image, "label_feature": label, "classes": CLASSES}
    if not texts:
        described |= {"first_class": first, "num_classes": len(CLASSES)}
        described["classes"] = CLASSES if draw(st.booleans()) else ()
    return files, described, draw(st.sampled_from(("", "GZIP")))


def encoded(row: dict) -> bytes:
    features = {}
    for name, value in row.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if values and isinstance(values[0], bytes):
            features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        elif values and isinstance(values[0], int):
            features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        else:
            features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def expected_label(row: dict, described: dict) -> int | None:
    """Returns the class id of a row; None if it has none."""
    value = row[described["label_feature"]]
    if isinstance(value, bytes):
        classes = [name.encode() for name in CLASSES]
        return classes.index(value) if value in classes and "first_class" not in described else None
    number = (
        value - described["first_class"]
        if type(value) is int and "first_class" in described
        else -1
    )
    return number if 0 <= number < len(CLASSES) else None


@fuzzed(8, drawn=record_files())
def test_each_record_of_another_writer(tmp_path_factory, drawn):
    files, described, compression = drawn
    folder = tmp_path_factory.mktemp("records")
    for name, rows in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        tfrecord.write(str(folder / name), map(encoded, rows), compression)
    expected, bad = [], []
    for name, rows in files.items():
        for number, row in enumerate(rows):
            label = expected_label(row, described)
            expected.append((row[described["image_feature"]], label))
            bad += [f"record {number} of {folder}/{name}"] if label is None else []
    try:
        reader = ImageRecordReader(str(folder), ReadOptions(**described))
        found = [e for part in reader.parts for e in reader.read_examples(part)]
    except UserError as error:
        # The first record alone tells what the features are.
        first = expected_label(next(iter(files.values()))[0], described) is None
        assert bad and (bad[0] in str(error) or first), (bad, str(error))
    else:
        assert not bad and [(e["image"], int(e["label"])) for e in found] == expected
        assert reader.features["label"].num_classes == len(CLASSES)
