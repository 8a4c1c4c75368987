"""Lines of a run: nothing is lost while a disk or a bucket is away."""

import itertools
import json

import pytest
import tensorflow as tf

from tests.support.fakes.fake_storage import BUCKET, Fault
from tests.support.fakes.faulty_storage import Storage
from tftpu.storage import buckets, files, lines, retry
from tftpu.storage.lines import Lines


@pytest.fixture
def service(_bucket, monkeypatch):
    _bucket.empty()
    tf.io.gfile.listdir(f"gs://{BUCKET}")
    monkeypatch.setattr(retry, "POLICY", retry.Policy(1.0, first_wait=0.01, longest_wait=0.04))
    monkeypatch.setattr(lines, "SECONDS", 0.0)
    return _bucket


def numbered(step: int) -> str:
    return json.dumps({"step": step, "split": "train", "loss": 0.5}) + "\n"


URI = f"gs://{BUCKET}/run/metrics.jsonl"


def test_each_line_is_uploaded_once(service, monkeypatch):
    uploaded = []
    publish, append = buckets.publish, buckets.append
    monkeypatch.setattr(
        buckets, "publish", lambda u, d, g=0: (uploaded.append(d), publish(u, d, g))[1]
    )
    monkeypatch.setattr(buckets, "append", lambda u, d, b: (uploaded.append(d), append(u, d, b))[1])
    metrics = Lines(URI, 0)
    for step in range(1, 21):
        metrics.append(numbered(step))
        metrics.flush()
    metrics.close()
    whole = "".join(map(numbered, range(1, 21))).encode()
    assert service.content("run/metrics.jsonl") == whole
    # The first append publishes a new object.
    assert b"".join(uploaded[1:]) == whole
    assert service.names() == {"run/metrics.jsonl"}  # no part is left


@pytest.mark.parametrize("what", [503, "drop", 429])
def test_the_nth_request_of_an_append_fails_for_every_n(what, service, monkeypatch):
    """Also where only the answer is lost: no line twice, and none missing."""
    monkeypatch.setattr(retry, "POLICY", retry.Policy(20.0, first_wait=0.01, longest_wait=0.04))
    for n in itertools.count(0):
        service.storage.wipe(keep_buckets=True)
        service.faults.clear()
        metrics = Lines(URI, 0)
        metrics.append(numbered(1))
        metrics.flush()
        faults = [Fault(m, ".", what, after=n) for m in ("GET", "POST", "DELETE")]
        service.faults += faults
        for step in (2, 3):
            metrics.append(numbered(step))
            metrics.flush()
        metrics.close()
        assert service.content("run/metrics.jsonl").decode() == "".join(map(numbered, (1, 2, 3)))
        if all(fault.times for fault in faults):
            break
    assert n > 3


@pytest.mark.medium
def test_lines_are_kept_while_a_bucket_is_away(service, caplog):
    metrics = Lines(URI, 0)
    metrics.append(numbered(1))
    metrics.flush()
    service.faults += [Fault(m, ".", "drop", times=None) for m in ("GET", "POST", "DELETE")]
    for step in (2, 3):
        metrics.append(numbered(step))
        metrics.flush()
    assert caplog.text.count("metrics.jsonl cannot be written") == 1
    service.faults.clear()
    metrics.append(numbered(4))
    metrics.flush()
    assert service.content("run/metrics.jsonl").decode() == "".join(map(numbered, range(1, 5)))
    assert "is written again; nothing is lost" in caplog.text


@pytest.mark.medium
def test_lines_whose_answer_never_came_are_not_written_twice(service, caplog):
    metrics = Lines(URI, 0)
    metrics.append(numbered(1))
    metrics.flush()
    service.faults += [Fault("POST", "/compose", "drop", times=None)]
    service.faults += [Fault("GET", ".", 503, times=None)]
    metrics.append(numbered(2))
    metrics.flush()
    assert "metrics.jsonl cannot be written" in caplog.text
    service.faults.clear()
    metrics.append(numbered(3))
    metrics.close()
    assert service.content("run/metrics.jsonl").decode() == "".join(map(numbered, (1, 2, 3)))


def test_lines_beyond_the_limit_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lines, "LIMIT", 3 * len(numbered(1)))
    metrics = Lines(str(tmp_path / "metrics.jsonl"), 0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_operate", Storage(1, "ENOSPC"))
        for step in range(1, 8):
            metrics.append(numbered(step))
            metrics.flush()
    metrics.flush()
    assert "4 lines beyond the limit are lost" in caplog.text
    kept = (tmp_path / "metrics.jsonl").read_text()
    assert kept == "".join(map(numbered, (1, 2, 3)))


def test_more_lines_than_the_limit_are_kept_if_every_write_succeeds(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lines, "LIMIT", 3 * len(numbered(1)))
    metrics = Lines(str(tmp_path / "metrics.jsonl"), 0)
    for step in range(1, 8):
        metrics.append(numbered(step))
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(map(numbered, range(1, 8)))
    assert not caplog.text


def test_an_object_that_another_run_wrote_is_not_replaced(service, caplog):
    metrics = Lines(URI, 0)
    metrics.append(numbered(1))
    metrics.flush()
    service.overwrite("run/metrics.jsonl", b"another run's\n")
    metrics.append(numbered(2))
    metrics.flush()
    assert service.content("run/metrics.jsonl") == b"another run's\n"
    assert "another process wrote it meanwhile" in caplog.text


def test_lines_are_not_dropped_from_an_object_that_changed_meanwhile(service):
    metrics = Lines(URI, 0)
    metrics.append(numbered(1))
    metrics.flush()

    def edit(data):
        service.overwrite("run/metrics.jsonl", b"another run's\n")
        return b""

    with pytest.raises(buckets.ChangedError):
        metrics._place.change(edit)
    assert service.content("run/metrics.jsonl") == b"another run's\n"


def test_the_part_of_another_process_is_not_joined(service, monkeypatch):
    metrics = Lines(URI, 0)
    metrics.append(numbered(1))
    metrics.flush()
    written = buckets._write_object

    def slow(*arguments):
        service.overwrite("run/metrics.jsonl.part", b"another run's\n")
        written(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "_write_object", slow)
        metrics.append(numbered(2))
        metrics.flush()
    assert service.content("run/metrics.jsonl").decode() == numbered(1)
    metrics.flush()
    assert service.content("run/metrics.jsonl").decode() == numbered(1) + numbered(2)


@pytest.mark.parametrize("how", ["EIO", "ENOSPC", "EROFS"])
def test_the_nth_operation_of_appending_fails_for_every_n(how, tmp_path, monkeypatch):
    for n in itertools.count(1):
        path = tmp_path / f"{n}.jsonl"
        metrics = Lines(str(path), 0)
        faulty = Storage(n, how)
        with monkeypatch.context() as patch:
            patch.setattr(files, "_operate", faulty)
            for step in (1, 2):
                metrics.append(numbered(step))
                metrics.flush(durable=True)
        metrics.append(numbered(3))
        metrics.close()
        assert path.read_text() == "".join(map(numbered, (1, 2, 3)))
        if not faulty.reached:
            break
    assert n > 6


def test_a_disk_that_takes_half_of_a_line_gets_the_rest_later(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    metrics = Lines(str(path), 0)
    write = files._write_some
    with monkeypatch.context() as patch:

        def half(file, data):
            if len(data) < 20:
                raise OSError("no space")
            return write(file, data[: len(data) // 2])

        patch.setattr(files, "_write_some", half)
        metrics.append(numbered(1))
        metrics.flush()
    assert 0 < len(path.read_text()) < len(numbered(1))
    metrics.append(numbered(2))
    metrics.close()
    assert path.read_text() == numbered(1) + numbered(2)


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_resumed_run_drops_the_lines_that_it_repeats(place, service, tmp_path, caplog):
    path = str(tmp_path / "metrics.jsonl") if place == "disk" else URI
    before = "".join(map(numbered, range(1, 6))).encode() + b'{"step": 6, "lo'
    (files.write_whole if place == "disk" else buckets.publish)(path, before)
    metrics = Lines(path, 3)
    metrics.append(numbered(4))
    metrics.append(numbered(5))
    metrics.roll_back(4)
    metrics.append(numbered(5))
    metrics.close()
    assert files.read(path).decode() == "".join(map(numbered, (1, 2, 3, 4, 5)))
    assert not caplog.text  # a line that a kill interrupted is not damage


def test_damaged_lines_are_set_aside_with_one_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    damaged = numbered(1).encode() + b"\xff\xfe\n[]\n" + b"[" * 100_000 + b"\n"
    path.write_bytes(damaged)
    Lines(str(path), 9).close()
    assert path.read_text() == numbered(1)
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged
    assert caplog.text.count("damaged lines") == 1
