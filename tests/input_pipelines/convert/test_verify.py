"""`tftpu data verify` names the file and the record of all damage."""

import re
from pathlib import Path

import pytest
import tensorflow as tf

from tests.support.data.conversions import silent
from tftpu.input_pipelines.convert import converter
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.formats import example_proto, manifest, tfrecord
from tftpu.launch import main as command_line

pytestmark = pytest.mark.usefixtures("small_parts")


def spoil(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("missing", r"train-00001-of-00003.tfrecord is missing"),
        ("cut", r"train-00001-of-00003.tfrecord: record \d+ is corrupt: the file ends"),
        ("bit", r"train-00001-of-00003.tfrecord: record \d+ is corrupt: the checksum"),
        ("other", r"has another CRC32C than the manifest states"),
        ("image", r"record 2 of .*train-00001-of-00003.tfrecord: .*(PNG|decode)"),
        ("class", r"record 2 of .*train-00001-of-00003.tfrecord: .*not in \[0, 3\)"),
        ("count", r"train-00001-of-00003.tfrecord has 19 records, but 20 in the manifest"),
    ],
)
def test_verify_names_the_file_and_the_record(pictures, tmp_path, capsys, what, named):
    output = str(tmp_path)
    made = converter.run(Conversion(f"images:{pictures}", output, min_shards=3), 1, say=silent)
    path = tmp_path / "train-00001-of-00003.tfrecord"
    inside = [record for _, record in tfrecord.read_records(str(path))]
    if what == "missing":
        path.unlink()
    elif what == "cut":
        spoil(path, lambda data: data[:-30])
    elif what == "bit":
        spoil(path, lambda data: data[:900] + bytes([data[900] ^ 4]) + data[901:])
    elif what == "other":
        spoil(path, lambda data: (tmp_path / "train-00000-of-00003.tfrecord").read_bytes())
    elif what == "count":
        tfrecord.write(str(path), inside[:-1])
    else:
        features = {**made.features, "label": manifest.Feature("int32")}
        bad = {"image": b"\x89PNG\r\n\x1a\nno image" if what == "image" else inside_png(pictures)}
        bad["label"] = 3 if what == "class" else 0
        inside[2] = example_proto.encode(bad, features)
        tfrecord.write(str(path), inside)
    assert command_line.main(["data", "verify", output, "--workers=1"]) == 2
    assert re.search(named, capsys.readouterr().out)


@pytest.mark.medium
def test_verify_names_the_file_that_a_broken_record_was_made_of(pictures, tmp_path, capsys):
    """Another program, or an older tftpu, may have made a record of a damaged file."""
    output = str(tmp_path)
    converter.run(Conversion(f"images:{pictures}", output), 1, say=silent)
    (path,) = tmp_path.glob("*.tfrecord")
    examples = [
        tf.train.Example.FromString(record) for _, record in tfrecord.read_records(str(path))
    ]
    cut = examples[5].features.feature["image"].bytes_list.value
    name = next(p for p in pictures.rglob("*.png") if p.read_bytes() == cut[0])
    cut[0] = cut[0][:-20]
    tfrecord.write(str(path), [example.SerializeToString() for example in examples])
    assert command_line.main(["data", "verify", output, "--workers=1"]) == 2
    said = capsys.readouterr().out
    assert f"record 5 of {path} (made from {name.relative_to(pictures)}): " in said


def inside_png(pictures: Path) -> bytes:
    return next(pictures.rglob("*.png")).read_bytes()
