"""TensorFlow's own `gs://` with everything tftpu writes and reads, on an emulated bucket."""

import json
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import warm
from tests.support.data import data_sets
from tests.support.fakes import checkpoint_hosts, gs_proxy
from tests.support.fakes.fake_storage import BUCKET, Fault
from tests.support.models.leaves import leaf
from tftpu import input_pipelines
from tftpu.checkpoint.store import Checkpoints
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import converter, verify
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers import addresses, text
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.reading import cache, damage
from tftpu.input_pipelines.sources import StreamedImages, Tokens
from tftpu.launch import main as command_line
from tftpu.observe import writers
from tftpu.storage import files


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """Yields the bucket, and the environment of a process that uses it."""
    with gs_proxy.bucket(tmp_path_factory.mktemp("certificates")) as served:
        yield served


@pytest.fixture
def service(bucket):
    service, _ = bucket
    service.empty()
    tf.io.gfile.listdir(f"gs://{BUCKET}")
    return service


def test_files_of_a_bucket_are_written_read_listed_and_removed(service):
    folder = f"gs://{BUCKET}/files"
    files.write_whole(f"{folder}/a/one", b"1")
    files.write_whole(f"{folder}/two", b"")
    assert files.read(f"{folder}/a/one") == b"1"
    assert files.read(f"{folder}/two") == b""
    assert files.list_names(folder) == ["a", "two"]
    assert files.list_folder(folder) == (["two"], ["a"])
    assert files.exists(f"{folder}/two") and not files.exists(f"{folder}/three")
    with pytest.raises(FileNotFoundError):
        files.read(f"{folder}/three")
    files.remove_tree(folder)
    assert files.list_names(folder) == []
    assert service.names() == set()


def test_a_folder_of_texts_in_a_bucket_is_not_called_an_empty_file(service):
    files.write_whole(f"gs://{BUCKET}/books/1.txt", b"text")
    files.write_whole(f"gs://{BUCKET}/empty.txt", b"")
    with pytest.raises(UserError, match=rf"as text:gs://{BUCKET}/books/\*\.$"):
        addresses.build_reader(f"text:gs://{BUCKET}/books", ReadOptions())
    with pytest.raises(UserError, match="The file is empty"):
        addresses.build_reader(f"text:gs://{BUCKET}/empty.txt", ReadOptions())


@pytest.mark.slow
def test_a_data_set_is_converted_into_a_bucket_verified_and_read(service, tmp_path, monkeypatch):
    """Uploaded by Google's client, read by TensorFlow; a service that falters changes nothing."""
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "PART_BYTES", 20_000)
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 5000)
    options = ReadOptions(context=100)

    def conversion(output):
        source = f"text:{tmp_path}/*.txt"
        return Conversion(source, str(output), options, min_shards=5)

    output = f"gs://{BUCKET}/data/text"
    service.faults += [
        Fault("POST", "upload.*uploadType=multipart", 503, times=2),
        Fault("POST", "upload.*uploadType=multipart", "drop", times=1),
    ]
    made = converter.run(conversion(output), workers=1, say=lambda *_: None)
    here = converter.run(conversion(tmp_path / "here"), workers=1, say=lambda *_: None)
    assert made.splits == here.splits
    for shard in made.list_shards("train"):
        assert (
            service.content(f"data/text/{shard.name}")
            == (tmp_path / "here" / shard.name).read_bytes()
        )
    assert not list((tmp_path / "cache").glob(".converting*"))
    assert verify.run(output, workers=1)[1] == []
    paths = [made.build_path(shard) for shard in manifest.read(output).list_shards("train")]
    count = sum(1 for _ in tf.data.TFRecordDataset(paths))
    assert count == made.count_examples("train")
    # Run again, it uploads nothing; a corrupted shard is found.
    service.requests.clear()
    converter.run(conversion(output), workers=1, say=lambda *_: None)
    assert service.requested("POST", "upload") == 0
    service.overwrite(f"data/text/{made.list_shards('train')[2].name}", b"spoilt")
    assert "00002-of-00005" in verify.run(output, workers=1)[1][0]
    # The source in the bucket as well.
    again = Conversion(f"tfrecord:{output}", f"gs://{BUCKET}/again", ReadOptions())
    service.overwrite(
        f"data/text/{made.list_shards('train')[2].name}",
        (tmp_path / "here" / made.list_shards("train")[2].name).read_bytes(),
    )
    assert converter.run(again, 1, say=lambda *_: None).count_examples("train") == count


def converted(tmp_path, output: str, count: int) -> manifest.Manifest:
    """Converts text to a number of packed shards."""
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * (6000 // count))
    options = ReadOptions(context=50)
    conversion = Conversion(f"text:{tmp_path}/*.txt", output, options, min_shards=count)
    return converter.run(conversion, 1, staging_folder=str(tmp_path), say=lambda *_: None)


@pytest.fixture
def rows(service, tmp_path, monkeypatch):
    """Returns packed text in 6 shards in the bucket."""
    monkeypatch.setattr(text, "PART_BYTES", 5_000)
    return converted(tmp_path, f"gs://{BUCKET}/rows", 6)


def batches(count: int, **changes) -> list:
    given = {"data_dir": f"gs://{BUCKET}/rows", "context": 50, "global_batch_size": 16}
    data = Tokens(**(given | changes))
    data.validate()
    stream = input_pipelines.training(data, seed=1).starting_at(0).take(count)
    return [features["tokens"].tolist() for features, _, _ in stream.as_numpy_iterator()]


@pytest.mark.slow
def test_shards_are_read_through_a_cache_on_local_disk(service, rows, tmp_path):
    epochs = 2 * rows.count_examples("train") // 16
    whole = batches(epochs)
    folder = str(tmp_path / "cache")
    service.requests.clear()
    assert batches(epochs, cache_dir=folder) == whole
    assert service.requested("GET", "download.*train-0") == 6
    service.requests.clear()
    assert batches(epochs, cache_dir=folder) == whole
    assert service.requested("GET", "train-0.*alt=media|buckets.googleapis.*train-0") == 0


@pytest.mark.slow
def test_a_cache_with_room_for_concurrent_reads_only_downloads_again(
    service, tmp_path, monkeypatch
):
    monkeypatch.setattr(text, "PART_BYTES", 100)
    rows = converted(tmp_path, f"gs://{BUCKET}/many", 70)
    converted(tmp_path, str(tmp_path / "here"), 70)
    room = sum(sorted(shard.bytes for shard in rows.list_shards("train"))[-64:])
    folder = tmp_path / "cache"
    cached = {"data_dir": rows.folder, "cache_dir": str(folder), "global_batch_size": 64}
    epochs = 3 * rows.count_examples("train") // 64
    here = batches(epochs, data_dir=str(tmp_path / "here"), global_batch_size=64)
    assert batches(epochs, cache_gb=room / 2**30, **cached) == here
    assert sum(f.stat().st_size for f in folder.iterdir()) <= room
    assert service.requested("GET", "download.*train-0") > 70
    with pytest.raises(UserError, match="the 64 shards that may be read at once have"):
        batches(epochs, cache_gb=0.9 * room / 2**30, **cached)


@pytest.mark.slow
def test_a_shard_that_changed_stops_a_run_that_caches(service, rows, tmp_path):
    shard = rows.list_shards("train")[3]
    service.overwrite(f"rows/{shard.name}", bytes(shard.bytes))
    with pytest.raises(tf.errors.OpError, match=f"{shard.name} changed since its manifest"):
        batches(2 * rows.count_examples("train") // 16, cache_dir=str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "message"),
    [
        (None, "cannot be reached .*403"),
        pytest.param(1, "could not be read at first, but can be read now", marks=pytest.mark.slow),
    ],
)
def test_a_read_error_of_the_bucket_is_no_bad_record(
    service, rows, monkeypatch, caplog, times, message
):
    # An error at the first byte stops the run in any case.
    monkeypatch.setattr(damage, "probe_file", lambda path: tf.data.Dataset.from_tensors(""))
    fault = Fault("GET", f"{rows.list_shards('train')[3].name}($|.*alt=media)", 403, times)
    service.faults.append(fault)
    with pytest.raises(tf.errors.OpError, match=message):
        batches(rows.count_examples("train") // 16, on_bad_record="skip")
    assert "Skipped" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, None])
def test_an_image_in_a_bucket_that_is_away_for_a_while_is_read_again(service, times, caplog):
    for number in range(4):
        name = f"gs://{BUCKET}/pictures/train/{'ab'[number % 2]}/{number}.jpg"
        files.write_whole(name, data_sets.picture(number * 60))
    data = StreamedImages(
        data_dir=f"gs://{BUCKET}/pictures",
        format="folder",
        eval_split="train",
        image_size=8,
        num_classes=2,
        global_batch_size=4,
        on_bad_record="skip",
    )
    service.faults.append(Fault("GET", r"2\.jpg($|\?)", 403, times))
    if times:
        ((_, labels, weights),) = input_pipelines.evaluation(data)
        assert sorted(labels.numpy()) == [0, 0, 1, 1] and weights.numpy().tolist() == [1] * 4
    else:
        with pytest.raises(tf.errors.OpError, match=r"2\.jpg cannot be reached .*403"):
            list(input_pipelines.evaluation(data))
    assert "Skipped" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data_dir": "/local"}, "keeps local copies of a bucket's shards"),
        ({"cache_gb": 0}, "must be above 0"),
        ({"service": "localhost:1"}, "use only one of the two"),
    ],
)
def test_an_invalid_cache_fails_with_a_clear_error(tmp_path, changes, sentence):
    data = Tokens(**{"data_dir": "gs://b/c", "cache_dir": str(tmp_path), **changes})
    with pytest.raises(UserError, match=sentence):
        data.validate()
        cache.from_data(data)


def test_checkpoints_in_a_bucket_are_complete_or_absent(service):
    checkpoints = Checkpoints(f"gs://{BUCKET}/run", keep=2)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for step in (1, 2, 3):
        array += 1
        checkpoints.save(step, {"model": [leaf("kernel", array)]}, {"step": step})
    checkpoints.wait()
    assert checkpoints.list_steps() == [2, 3]
    # A checkpoint without its manifest does not count.
    files.remove(f"gs://{BUCKET}/run/checkpoints/3/manifest.json")
    array[:] = 0
    restored = checkpoints.restore({"model": [leaf("kernel", array)]})
    assert restored.step == 2
    assert array.tolist() == [[2, 3, 4], [5, 6, 7]]


def test_several_hosts_write_one_checkpoint_into_a_bucket(service):
    workdir = f"gs://{BUCKET}/pod"
    hosts = checkpoint_hosts.hosts_of(workdir, 7.0)
    assert checkpoint_hosts.save(hosts, 1) == [None] * checkpoint_hosts.COUNT
    for host in hosts[:2]:  # the third is lost before it writes
        host.checkpoints.save(2, host.leaves, {})
    end = time.monotonic() + 60
    while not tf.io.gfile.glob(f"{workdir}/checkpoints/2/model-1-*"):
        assert time.monotonic() < end
        time.sleep(0.1)
    again = checkpoint_hosts.hosts_of(workdir)
    for index, host in enumerate(again):
        assert host.checkpoints.restore(host.leaves).step == 1
        assert (host.kernel == 7 + index).all() and (host.bias == 7).all()
    assert checkpoint_hosts.save(again, 2) == [None] * checkpoint_hosts.COUNT
    assert again[0].checkpoints.list_steps() == [1, 2]


def test_writers_write_into_a_bucket(service):
    folder = f"gs://{BUCKET}/run"
    tensorboard = writers.TensorBoard(folder)
    lines = writers.JsonLines(f"{folder}/metrics.jsonl", 0)
    for step in (1, 2, 3):
        tensorboard.write(step, "train", {"loss": 1.0 / step})
        lines.write(step, "train", {"loss": 1.0 / step})
        assert not tf.summary.scalar(
            "of nobody", 1.0, step=step
        )  # no writer is left as the default
    tensorboard.close()
    lines.close()
    (events,) = tf.io.gfile.glob(f"{folder}/train/events*")
    records = [tf.compat.v1.Event.FromString(r.numpy()) for r in tf.data.TFRecordDataset(events)]
    seen = {
        event.step: float(tf.make_ndarray(event.summary.value[0].tensor))
        for event in records
        if event.summary.value
    }
    assert seen == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3})
    kept = [json.loads(line) for line in files.read(f"{folder}/metrics.jsonl").splitlines()]
    assert [line["step"] for line in kept] == [1, 2, 3]


def test_a_keras_model_is_saved_in_a_bucket_and_loaded(service):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    path = f"gs://{BUCKET}/model.keras"
    model.save(path)
    x = np.ones((4, 3), np.float32)
    loaded = keras.models.load_model(path)
    assert np.array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_workdir_in_a_read_only_bucket_fails_with_a_clear_error(service, capsys):
    """The error contains no token."""
    service.faults += [Fault(m, "upload|/o", 403, times=None) for m in ("POST", "PUT", "GET")]
    code = command_line.main(["train", "--config=digits_resnet", f"--workdir=gs://{BUCKET}/no"])
    said = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in said.err
    assert gs_proxy.TOKEN not in said.err + said.out


@pytest.mark.slow
def test_a_killed_run_in_a_bucket_resumes(bucket, service, tmp_path):
    """`tftpu train --workdir=gs://…` in a separate process, compared with an undisturbed one."""
    _, environment = bucket

    def start(workdir):
        command = (sys.executable, "-m", "tftpu.launch.main", "train", "--config=digits_resnet")
        small = ("--config.train.steps=60", "--config.train.eval_every=30")
        more = ("--config.train.checkpoint_every=20", "--config.train.log_every=10")
        return warm.Popen(
            [*command, *small, *more, f"--workdir={workdir}"],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    workdir = f"gs://{BUCKET}/killed"
    child = start(workdir)
    while "killed/checkpoints/20/manifest.json" not in service.names():
        assert child.poll() is None, child.communicate()[0]
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    said = []
    for place in (workdir, str(tmp_path / "whole")):
        child = start(place)
        said.append(child.communicate(timeout=300)[0])
        assert child.returncode == 0, said[-1]
    assert gs_proxy.TOKEN not in said[0]
    results = []
    for folder in (workdir, str(tmp_path / "whole")):
        lines = [json.loads(x) for x in files.read(f"{folder}/metrics.jsonl").splitlines()]
        results.append([(x["step"], x["split"], x["loss"]) for x in lines])
    assert results[0] == results[1]
    assert tf.io.gfile.glob(f"{workdir}/train/events*")


@pytest.mark.medium
def test_what_events_upload_does_not_grow_with_the_length_of_the_run(service, monkeypatch):
    """Every flush uploads a file whole: long runs begin new ones, which TensorBoard joins."""
    monkeypatch.setattr(writers, "EVENTS", 5_000)
    tensorboard = writers.TensorBoard(f"gs://{BUCKET}/long")
    uploaded = []
    for step in range(1, 41):
        before = service.uploaded
        tensorboard.write(step, "train", {f"metric_{n}": 1.0 / step for n in range(10)})
        tensorboard._writers["train"].flush()
        uploaded.append(service.uploaded - before)
    tensorboard.close()
    assert max(uploaded[20:]) < 1.2 * max(uploaded[:20])
    accumulator = EventAccumulator(f"gs://{BUCKET}/long/train", size_guidance={"tensors": 0})
    # Files of the same second may be read in another order.
    steps = sorted(event.step for event in accumulator.Reload().Tensors("metric_3"))
    assert steps == list(range(1, 41))
