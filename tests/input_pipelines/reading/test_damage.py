"""Records whose length their file does not have: an error, never the end of the process."""

import dataclasses
import gzip
import os
import re
import zlib

import numpy as np
import pytest
import tensorflow as tf

from tests.support.data import data_sets
from tests.support.fakes import gs_proxy
from tests.support.fakes.fake_storage import BUCKET
from tests.support.hostile import files as hostile
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines import unlabelled
from tftpu.input_pipelines.convert import verify
from tftpu.input_pipelines.formats import manifest, tfrecord
from tftpu.input_pipelines.formats.manifest import INDEX_EVERY, Feature
from tftpu.input_pipelines.reading import counted
from tftpu.input_pipelines.reading.shards import Piece, Shards
from tftpu.input_pipelines.sources import Records
from tftpu.storage import files

LENGTHS = (1 << 36, 1 << 60)
FEATURES = {"x": Feature("int64"), "y": Feature("int32")}


def shards(folder, length=None, compression="") -> manifest.Manifest:
    """Writes two shards of ten examples; the fourth of the second states a length."""
    examples = [{"x": number, "y": 0} for number in range(20)]
    parts = data_sets.split(examples, 10, 10)
    made = data_sets.shards(folder, FEATURES, {"train": parts}, compression)
    if length is None:
        return made
    path = folder / "train-00001"
    if compression:
        path.write_bytes(gzip.decompress(path.read_bytes()))
    hostile.with_length(path, 3, length)
    if compression:
        path.write_bytes(gzip.compress(path.read_bytes()))
    # An attacker writes a manifest that matches, too.
    stored = dataclasses.replace(
        made.splits["train"][1],
        bytes=path.stat().st_size,
        crc32c=tfrecord.compute_checksum(str(path)),
    )
    made = dataclasses.replace(made, splits={"train": (made.splits["train"][0], stored)})
    manifest.write(made)
    return made


def settings(folder, **changes) -> Records:
    given = {"data_dir": str(folder), "global_batch_size": 5, "features": ("x",)}
    return Records(**{**given, **changes})


def trained(data: Records) -> list[int]:
    """Returns the numbers of an epoch's examples that count."""
    found = []
    for batch in input_pipelines.training(data).starting_at(0).take(4):
        x, _, weights = batch if data.weighted else (*batch, tf.ones(5))
        found += x.numpy()[weights.numpy() > 0].tolist()
    return sorted(found)


@pytest.fixture(scope="module")
def _bucket(tmp_path_factory):
    with gs_proxy.bucket(tmp_path_factory.mktemp("certificates")):
        yield


def upload_folder(folder) -> str:
    """Copies the files of a folder into the bucket; returns their folder there."""
    target = f"gs://{BUCKET}/{folder.parent.name}-{folder.name}"
    for file in folder.iterdir():
        files.write_whole(f"{target}/{file.name}", file.read_bytes())
    return target


@pytest.fixture(params=["disk", "elsewhere"])
def kept(request):
    """Returns a function from a local folder to where its files are then: there, or in a bucket."""
    if request.param == "disk":
        return str
    request.getfixturevalue("_bucket")
    return upload_folder


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_that_the_file_does_not_have_stops_training(tmp_path, length, compression, kept):
    shards(tmp_path, length, compression)
    folder = kept(tmp_path)
    named = f"record [3-9] of {folder}/train-00001 cannot be read: .*record 3 is corrupt: the"
    with pytest.raises(tf.errors.OpError, match=named):
        trained(settings(folder))


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_it_and_the_records_behind_it_are_skipped(tmp_path, length, caplog, kept):
    shards(tmp_path, length)
    assert trained(settings(kept(tmp_path), on_bad_record="skip")) == list(range(13))
    # The next pass over the data may have begun, and may skip some again.
    assert set(re.findall(r"Skipped record (\d+) of", caplog.text)) == set("3456789")
    assert "(7 so far)" in caplog.text


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("length", LENGTHS)
def test_verify_names_it(tmp_path, length, compression):
    shards(tmp_path, length, compression)
    _, (problem,) = verify.run(str(tmp_path), workers=1)
    assert re.search("train-00001: record 3 is corrupt: the file ends inside it", problem)


@pytest.mark.parametrize("length", LENGTHS)
def test_so_do_files_without_a_manifest(tmp_path, monkeypatch, length):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    shards(tmp_path / "data", length)
    (tmp_path / "data" / "dataset.json").unlink()
    with pytest.raises(UserError, match="train-00001: record 3 is corrupt: the file ends inside"):
        trained(settings(tmp_path / "data", spec=("x: int64", "y: int32")))


def test_only_what_a_reader_asks_for_is_looked_at(tmp_path):
    path = tmp_path / "f"
    tfrecord.write(str(path), [bytes(n) for n in range(6)])
    assert tfrecord.count_readable(str(path), 0, 6) == 6
    hostile.with_length(path, 4, 1 << 40)
    assert [tfrecord.count_readable(str(path), 0, count) for count in (3, 4, 5, 6)] == [3, 4, 4, 4]
    assert tfrecord.count_readable(str(path), 16 + 17, 4) == 2  # from the third record on
    data = bytearray(path.read_bytes())
    data[sum(16 + n for n in range(4)) + 9] ^= 1  # a checksum that TensorFlow finds itself
    path.write_bytes(data)
    assert tfrecord.count_readable(str(path), 0, 6) == 6
    path.write_bytes(b"")
    assert tfrecord.count_readable(str(path), 0, 6) == 6
    assert tfrecord.count_readable(str(tmp_path / "none"), 0, 6) == 6


def test_a_record_that_no_data_compress_to_is_not_unpacked(tmp_path):
    path, zeros = tmp_path / "bomb.gz", hostile.stated_length(1 << 27) + bytes(1 << 20)
    path.write_bytes(gzip.compress(tfrecord.frame_record(os.urandom(1 << 18)) + zeros, 1))
    found = tfrecord.read_records(str(path), "GZIP")
    assert len(next(found)[1]) == 1 << 18
    with pytest.raises(UserError, match="134,217,728 bytes is more than 100 times"):
        next(found)


def test_counting_that_takes_long_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tfrecord, "_LONG", 0.0)
    path = tmp_path / "train"
    path.write_bytes(b"".join(map(tfrecord.frame_record, [b"a"] * 5)))
    assert tfrecord.scan_shard(str(path)).examples == 5
    assert f"Counting the records of {path}: 1 so far" in caplog.text
    monkeypatch.setattr(counted, "_LONG", 0.0)
    for number in range(3):
        path.with_name(f"val-{number}").write_bytes(path.read_bytes())
    counted.read_manifest(str(tmp_path), "val", FEATURES)
    assert f"in {tmp_path}, once: 1 of 3 files" in caplog.text


def test_folders_of_records_are_named_as_splits(tmp_path):
    (tmp_path / "train").mkdir()
    tfrecord.write(str(tmp_path / "train" / "a.tfrec"), [b"a"])
    with pytest.raises(UserError, match=f"name the split to read, as {tmp_path}:train"):
        unlabelled.open_shards(str(tmp_path), FEATURES)
    assert unlabelled.open_shards(f"{tmp_path}:train", FEATURES)[1].count == 1


def test_a_folder_beside_records_is_none_of_them(tmp_path):
    (tmp_path / "train_logs").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match=r"There is no data set in .*: there is neither"):
        counted.read_manifest(str(tmp_path), "val", FEATURES)
    tfrecord.write(str(tmp_path / "train-0.tfrecord"), [b"a"])
    assert counted.read_manifest(str(tmp_path), "train", FEATURES).count_examples("train") == 1
    assert counted.read_manifest(str(tmp_path), "", FEATURES).count_examples("") == 1


def test_folders_in_the_folder_of_a_split_are_splits_of_it(tmp_path):
    (tmp_path / "train" / "part-0").mkdir(parents=True)
    tfrecord.write(str(tmp_path / "train" / "part-0" / "a.tfrecord"), [b"a"])
    with pytest.raises(
        UserError, match=f"name {tmp_path}/train as the folder, .* the split, as part-0"
    ):
        counted.read_manifest(str(tmp_path), "train", FEATURES)
    found = counted.read_manifest(f"{tmp_path}/train", "part-0", FEATURES)
    assert found.count_examples("part-0") == 1


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "train-0")
    with pytest.raises(UserError, match="train-0 is not a regular file"):
        next(tfrecord.read_records(str(tmp_path / "train-0")))
    with pytest.raises(UserError, match="train-0, but that file is missing"):
        data_sets.manifest.write(
            manifest.Manifest(
                str(tmp_path), FEATURES, {"train": (manifest.Shard("train-0", 1, 0),)}
            )
        )
        trained(settings(tmp_path))


@pytest.mark.slow
def test_the_whole_data_set_is_still_read(tmp_path, kept):
    shards(tmp_path)
    folder = kept(tmp_path)
    assert trained(settings(folder)) == list(range(20))
    assert np.sum(trained(settings(folder, on_bad_record="skip"))) == 190


@pytest.mark.slow
@pytest.mark.usefixtures("_bucket")
@pytest.mark.parametrize("step", [0, 3, 40])
def test_shards_that_are_not_on_a_disk_are_read_in_the_same_order(tmp_path, step):
    rng = np.random.default_rng(0)
    sizes = (3, 5_000, 300_000, 1_500_000)  # a call hands over many records, or one
    pieces = []
    for name, count in (("long", 2 * INDEX_EVERY + 5), ("short", 3)):
        drawn = rng.choice(sizes, count, p=(0.9, 0.09, 0.005, 0.005))
        written = tfrecord.write(str(tmp_path / name), [rng.bytes(size) for size in drawn])
        pieces.append(Piece(name, count, 0, written.offsets, written.bytes))

    def read(folder) -> list[tuple[int, int]]:
        placed = [dataclasses.replace(piece, path=f"{folder}/{piece.path}") for piece in pieces]
        batches = Shards(placed, shuffle=20).draw_records(6, 1, step).take(30).as_numpy_iterator()
        found = [pair for records, numbers, _ in batches for pair in zip(records, numbers)]
        assert all(record for record, _ in found)
        return [(zlib.crc32(record), number) for record, number in found]

    assert read(upload_folder(tmp_path)) == read(tmp_path)
