"""Every kind of source of `tftpu data convert`, and the errors of each."""

import csv
import json
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from tests.support.data.conversions import content, examples, one, silent
from tests.support.messages import check_message
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import converter
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers import addresses
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.formats import manifest
from tftpu.launch import main as command_line

pytestmark = pytest.mark.usefixtures("small_parts")


def test_text_is_tokenised_once_packed_and_reads_back(tmp_path):
    rows = [{"text": f"Zeile {n}: ä{'x' * (n % 50)}"} for n in range(200)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    for name in ("b", "c"):
        (tmp_path / f"{name}.jsonl").write_text("")
    options = ReadOptions(context=32)
    source = f"text:{tmp_path}/*.jsonl"
    conversion = Conversion(source, str(tmp_path / "out"), options, min_shards=3)
    made = converter.run(conversion, workers=1, say=silent)
    assert made.about["vocabulary"] == 256
    predicted = Counter()
    for shard in examples(tmp_path / "out"):
        for example in shard:
            tokens = np.frombuffer(one(example, "tokens"), np.uint8)
            segments = np.frombuffer(one(example, "segments"), np.uint16)
            predicted.update(tokens[1:][(segments[1:] == segments[:-1]) & (segments[1:] > 0)])
    assert predicted == Counter(b for row in rows for b in row["text"].encode()[1:])


@pytest.mark.slow
def test_a_tfds_data_set_split_by_split_and_converted_again(tmp_path):
    from sklearn.datasets import load_digits

    output = str(tmp_path / "digits")
    for split in ("train", "test"):
        options = ReadOptions(split=split)
        converter.run(Conversion("tfds:digits", output, options, min_shards=3), 1, say=silent)
    found = manifest.read(output)
    assert {split: found.count_examples(split) for split in found.splits} == {
        "train": 1437,
        "test": 360,
    }
    again = Conversion(f"tfrecord:{output}", str(tmp_path / "again"), min_shards=5, seed=9)
    converter.run(again, workers=1, say=silent)
    converter.run(
        Conversion(f"tfrecord:{output}", again.output, ReadOptions(split="test")), 1, say=silent
    )
    for folder in (output, again.output):
        labels = Counter()
        pixels = 0
        for split in ("train", "test"):
            for shard in examples(folder, split):
                for example in shard:
                    labels[one(example, "label")] += 1
                    pixels += tf.io.decode_png(one(example, "image")).numpy().sum(dtype=int)
        digits = load_digits()
        assert labels == Counter(digits.target.tolist())
        assert pixels == pytest.approx((digits.images * 255 / 16).round().sum(), rel=1e-5)


@pytest.mark.medium
def test_slices_of_a_split_become_separate_splits(tmp_path):
    for split in ("train[:90%]", "validation=train[90%:]"):
        options = ReadOptions(split=split)
        converter.run(Conversion("tfds:digits", str(tmp_path), options), 1, say=silent)
    found = manifest.read(str(tmp_path))
    assert {s: found.count_examples(s) for s in found.splits} == {"train": 1293, "validation": 144}
    images = [
        one(e, "image") for s in found.splits for shard in examples(tmp_path, s) for e in shard
    ]
    assert len(set(images)) > 1400  # a few digits were drawn alike


@pytest.mark.medium
def test_an_index_of_images_with_class_names(pictures, tmp_path):
    files = sorted(pictures.rglob("*.png"))
    for name, suffix in (("a", "csv"), ("b", "jsonl")):
        path = pictures / f"{name}.{suffix}"
        rows = [{"image": str(p.relative_to(pictures)), "label": p.parent.name} for p in files]
        if suffix == "csv":
            with open(path, "w", newline="", encoding="utf-8-sig") as file:  # as Excel does
                writer = csv.DictWriter(file, ["image", "label"])
                writer.writeheader()
                writer.writerows(rows)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = converter.run(Conversion(f"index:{path}", str(tmp_path / name)), 1, say=silent)
        path.unlink()
        assert made.about["classes"] == ["cat", "dog", "owl"]
        assert made.count_examples("train") == 60
    assert content(tmp_path / "a").keys() == content(tmp_path / "b").keys()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("image:x", "Did you mean 'images'?"),
        ("images", "KIND:WHAT"),
        ("images:/nowhere", "There is no folder /nowhere: name a folder of images"),
        ("index:/nowhere.csv", "cannot be read"),
        ("text:/nowhere/*.txt", "There is nothing in text:/nowhere/*.txt."),
        ("text:/nowhere/a.txt", "There is nothing in text:/nowhere/a.txt. There is no such file."),
        ("text:/nowhere", "Name the files in a folder, as text:/nowhere/*."),
        ("text:/,/nowhere/*", "text:/ is a folder: name the files in it, as text:/*."),
        ("tfds:digitz", "Did you mean 'digits'?"),
        ("tfrecord:/nowhere", "There is no data set in"),
    ],
)
def test_a_missing_source_fails_with_one_line(tmp_path, capsys, source, sentence):
    arguments = ["data", "convert", f"--source={source}", f"--output={tmp_path}/out"]
    assert command_line.main(arguments) == 2
    check_message(capsys.readouterr().err, sentence)


def test_an_empty_text_file_is_called_empty(tmp_path):
    (tmp_path / "n.txt").touch()
    with pytest.raises(UserError, match=r"nothing in .*n\.txt\. The file is empty"):
        addresses.build_reader(f"text:{tmp_path}/n.txt", ReadOptions())


def test_mistakes_of_a_source_name_the_file_and_the_line(pictures, tmp_path):
    def fails(source, match, **options):
        conversion = Conversion(source, str(tmp_path / "out"), ReadOptions(**options))
        with pytest.raises(UserError, match=match):
            converter.run(conversion, workers=1, say=silent)

    (tmp_path / "a.csv").write_text("image,label\nno.png,1\n")
    fails(f"index:{tmp_path}/a.csv", r"line 2 of .*a.csv: there is no image no.png")
    (tmp_path / "b.csv").write_text("file,label\nno.png,1\n")
    fails(f"index:{tmp_path}/b.csv", r"line 2 of .*b.csv has no 'image'.* It has file, label")
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    fails(f"text:{tmp_path}/c.jsonl", r"line 2 of .*c.jsonl: the field")
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\nno\n')
    fails(f"text:{tmp_path}/d.jsonl", r"line 2 of .*d.jsonl is not JSON")
    (tmp_path / "e.txt").write_bytes(b"\xff")
    fails(f"text:{tmp_path}/e.txt", r"e.txt is not UTF-8")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"GIF")
    fails(f"images:{tmp_path}/images", r"cat/1.jpg is not an image that can be read")
    fails("tfds:digits", "no feature 'labels'", features=("labels",))


@pytest.mark.parametrize(
    ("source", "option", "value"),
    [
        *(("images:x", name, "/nope") for name in ("tokenizer", "end_of_text", "data_dir")),
        ("tfrecord:x", "tokenizer", "/nope"),
        ("tfds:digits", "context", 5),
        ("index:x.csv", "features", ("a",)),
        ("text:x.txt", "snapshot", "2026-11-20T12:00:00Z"),
        ("text:x.txt", "skip_bad", True),
        ("bigquery:a.b.c", "field", "body"),
    ],
)
def test_an_option_of_another_kind_of_source_is_refused(source, option, value, tmp_path):
    given = ReadOptions(**{option: value})
    with pytest.raises(
        UserError, match=f"^{option} works only with sources .*, not with {source}: leave"
    ):
        converter.run(Conversion(source, str(tmp_path / "out"), given), workers=1, say=silent)
