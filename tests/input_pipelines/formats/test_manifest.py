"""A data set of shards: its manifest, its files, its records, against TensorFlow's own readers."""

import numpy as np
import pytest
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import example_proto, manifest, tfrecord
from tftpu.input_pipelines.formats.manifest import Feature, Manifest, Shard

FEATURES = {
    "tokens": Feature("uint16", (4,), "raw"),
    "label": Feature("int32", num_classes=3),
    "name": Feature("string"),
}


def example(**changes) -> dict:
    return {"tokens": np.arange(4), "label": 2, "name": "a", **changes}


def test_a_manifest_reads_back_as_written(tmp_path):
    shard = Shard("a.tfrecord", 300, 1234, "0123abcd", (0, 1000))
    written = Manifest(str(tmp_path), FEATURES, {"train": (shard,)}, "", {"classes": ["x", "y"]})
    manifest.write(written)
    assert manifest.read(str(tmp_path)) == written


def test_a_missing_or_inconsistent_manifest_fails_with_a_clear_error(tmp_path):
    with pytest.raises(UserError, match=r"dataset\.json is missing"):
        manifest.read(str(tmp_path))
    for shard, message in (
        (Shard("a.tfrecord", 300, 1234, "", (0,)), "300 examples, but 1 offsets: there must be 2"),
        (Shard("a.tfrecord", 300, 1234, "", (5, 5)), "offsets of a.tfrecord do not increase"),
        (Shard("a.tfrecord", -1, 1234), "bytes and offsets of a.tfrecord are not whole numbers"),
        (Shard("a.tfrecord", 1, 1234, "crc"), "the checksum of a.tfrecord is 'crc'"),
    ):
        contradiction = Manifest(str(tmp_path), FEATURES, {"train": (shard,)})
        with pytest.raises(UserError, match=message):
            manifest.write(contradiction)
        (tmp_path / "dataset.json").write_text(manifest.to_json(contradiction))
        with pytest.raises(UserError, match=message):
            manifest.read(str(tmp_path))
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a manifest"):
        manifest.read(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["../a", "a/../../b", "/etc/passwd", "gs://other/a", "", ".", "a//b", "./a", "a\0"]
)
def test_a_shard_that_is_not_in_the_folder_is_neither_written_nor_followed(tmp_path, name):
    data = Manifest(str(tmp_path), FEATURES, {"train": (Shard(name, 1, 20),)})
    with pytest.raises(UserError, match="which is not in the manifest's folder"):
        manifest.write(data)
    assert not list(tmp_path.iterdir())
    (tmp_path / "dataset.json").write_text(manifest.to_json(data))
    with pytest.raises(UserError, match="which is not in the manifest's folder"):
        manifest.read(str(tmp_path))


def test_a_shard_may_be_in_a_folder_below(tmp_path):
    data = Manifest(str(tmp_path), FEATURES, {"train": (Shard("a/b-0", 1, 20),)})
    manifest.write(data)
    assert manifest.read(str(tmp_path)) == data


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b'{"format": 1}', b"[]", b"null"])
def test_a_manifest_of_another_kind_is_one_clear_error(tmp_path, text):
    (tmp_path / "dataset.json").write_bytes(text)
    with pytest.raises(UserError, match=r"dataset\.json (cannot be read|has the format)"):
        manifest.read(str(tmp_path))


def test_a_missing_or_empty_split_fails_with_a_clear_error(tmp_path):
    data = Manifest(str(tmp_path), FEATURES, {"train": (Shard("a", 0, 0),)})
    flags = "--config.data.eval_split=train or --config.data.train_split=train"
    with pytest.raises(UserError, match=rf"Did you mean 'train'\?.* {flags}"):
        data.list_shards("trian")
    with pytest.raises(UserError, match="empty"):
        data.list_shards("train")


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_tensorflow_reads_files_written_by_tfrecord(tmp_path, compression):
    written = [bytes([i % 256]) * (i % 50) for i in range(600)]
    shard = tfrecord.write(str(tmp_path / "a.tfrecord"), written, compression)
    path = str(tmp_path / shard.name)
    dataset = tf.data.TFRecordDataset(path, compression)
    assert list(dataset.as_numpy_iterator()) == written
    assert [record for _, record in tfrecord.read_records(path, compression)] == written
    scanned = tfrecord.scan_shard(path, compression)
    assert (scanned.examples, scanned.bytes, scanned.offsets) == (600, shard.bytes, shard.offsets)
    assert scanned.crc32c == shard.crc32c
    for place, offset in enumerate(shard.offsets):
        with open(path, "rb") as file:
            file.seek(offset)
            assert file.read(8) == len(written[place * manifest.INDEX_EVERY]).to_bytes(8, "little")


def test_tfrecord_reads_files_written_by_tensorflow(tmp_path):
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(b"one")
        writer.write(b"two")
    assert list(tfrecord.read_records(path)) == [(0, b"one"), (19, b"two")]
    again = tfrecord.write(str(tmp_path / "b.tfrecord"), [b"one", b"two"])
    assert (tmp_path / again.name).read_bytes() == (tmp_path / "a.tfrecord").read_bytes()


def test_a_corrupt_record_is_named(tmp_path):
    path = tmp_path / "a.tfrecord"
    tfrecord.write(str(path), [b"one", b"two", b"three"])
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"two", b"tow"))
    with pytest.raises(UserError, match=r"a\.tfrecord: record 1 is corrupt: the checksum"):
        tfrecord.scan_shard(str(path))
    path.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=r"a\.tfrecord: record 2 is corrupt: the file ends"):
        tfrecord.scan_shard(str(path))
    with pytest.raises(UserError, match=r"b\.tfrecord cannot be read"):
        tfrecord.scan_shard(str(tmp_path / "b.tfrecord"))


def test_an_example_survives_encoding_and_decoding():
    record = example_proto.encode(example(), FEATURES)
    assert record == example_proto.encode(example(tokens=[0, 1, 2, 3]), FEATURES)
    parsed = example_proto.build_parser(FEATURES)(
        tf.constant([record, record]), tf.constant(["a", "b"])
    )
    assert parsed["tokens"].numpy().tolist() == [[0, 1, 2, 3]] * 2
    assert parsed["label"].numpy().tolist() == [2, 2]
    assert parsed["name"].numpy().tolist() == [b"a", b"a"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"label": 3}, "the class 3"),
        ({"label": -1}, "the class -1"),
        ({"tokens": [1, 2, 3]}, r"shape \(3,\): it must be \(4,\)"),
        ({"tokens": [1, 2, 3, 70000]}, "which is not uint16"),
        ({"label": "cat"}, "'label' holds cat, which is not int32"),
        ({"label": None}, "'label' holds None, which is not int32"),
        ({"label": 1 << 70}, "'label' holds 1180591620717411303424, which is not int32"),
        ({"label": "x" * 1000}, "'label' holds x{80}, which is not int32"),
        (
            {"tokens": [1, [2, 3], 4, 5]},
            r"holds \[1, \[2, 3\], 4, 5\], which is not uint16",
        ),
        ({"name": 3}, "'name' holds 3: it must be text or bytes"),
        ({"name": None}, "'name' holds None: it must be text or bytes"),
        ({"lable": 1}, "Did you mean 'label'"),
    ],
)
def test_an_example_that_does_not_match_the_features_fails(changes, message):
    with pytest.raises(UserError, match=message):
        example_proto.encode(example(**changes), FEATURES)


@pytest.mark.parametrize(
    "other, message",
    [
        ({"label": Feature("int32")}, r"class id 'label' is not in \[0, 3\)"),
        ({"tokens": Feature("uint16", (5,), "raw")}, "'tokens' must have 8 bytes"),
        ({"label": Feature("float32")}, "Data types don't match"),
        ({"label": Feature("int32", (2,))}, "label"),
    ],
)
def test_a_record_of_other_features_is_named(other, message):
    value = example(tokens=np.arange(other.get("tokens", FEATURES["tokens"]).shape[0]), label=7)
    if "label" in other and other["label"].shape:
        value["label"] = [1, 2]
    elif "tokens" in other:
        value["label"] = 1
    good = example_proto.encode(example(), FEATURES)
    bad = example_proto.encode(value, {**FEATURES, **other})
    with pytest.raises(tf.errors.InvalidArgumentError, match=message) as error:
        example_proto.build_parser(FEATURES)(
            tf.constant([good, bad]), tf.constant(["record 0", "record 1"])
        )
    assert "record 1" in str(error.value)


@pytest.mark.parametrize("dtype, classes", [("uint8", 256), ("uint8", 300), ("uint16", 1 << 16)])
def test_raw_class_ids_may_fill_their_dtype(dtype, classes):
    """Such as the bytes of a text or the grey levels of an image."""
    features = {"y": Feature(dtype, (3,), "raw", classes)}
    most = np.iinfo(dtype).max
    record = example_proto.encode({"y": [0, 50, most]}, features)
    found = example_proto.build_parser(features)(tf.constant([record]), tf.constant(["a"]))
    assert found["y"].numpy().tolist() == [[0, 50, most]]


@pytest.mark.parametrize("dtype, number", [("uint8", 300), ("uint16", -1), ("int32", 1 << 40)])
def test_a_number_of_another_program_that_its_dtype_cannot_hold_is_named(dtype, number):
    features = {"x": Feature(dtype, (2,))}
    stored = [
        example_proto.encode({"x": [5, n]}, {"x": Feature("int64", (2,))}) for n in (7, number)
    ]
    parse = example_proto.build_parser(features)
    assert parse(tf.constant(stored[:1]), tf.constant(["a"]))["x"].numpy().tolist() == [[5, 7]]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"'x' holds .* is not {dtype}"
    ) as error:
        parse(tf.constant(stored), tf.constant(["record 0", "record 1"]))
    assert "record 1" in str(error.value)
