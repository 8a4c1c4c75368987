"""Damaged files of predictions are found by their checksums, and written again."""

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import gs_proxy
from tftpu.errors import UserError
from tftpu.inference.predict import Job, predict, verify
from tftpu.input_pipelines.formats import results
from tftpu.storage import files

FORMATS = {
    "jsonl": results.jsonl,
    "csv": functools.partial(results.csv, with_errors=False),
    "tfrecord": results.tfrecord,
    "parquet": functools.partial(results.parquet, with_errors=False),
}


class Numbers:
    """Records and a model in one: the outputs for a number are twice that number."""

    def __init__(self, count: int):
        self.count, self.skipped = count, dict[int, str]()
        self.computed = 0

    def features(self, ranges: Any) -> Any:
        return ranges

    def predict_batches(self, x: Any) -> Any:
        for numbers in x:
            self.computed += len(numbers)
            yield np.array([[2 * n, n / 3] for n in numbers], np.float32)

    def places(self, numbers: range) -> Any:
        return ["x"] * len(numbers), list(numbers)

    def read_fields(self, numbers: range, names: Any) -> Any:
        return {}


def job(folder: Any, form: str = "jsonl", **changes: Any) -> Job:
    given = {"columns": lambda found: {"y": found}, "plan": {"of": "x"}, "records_per_shard": 2}
    return Job(str(folder), form, FORMATS[form], **{**given, **changes})


def predicted(folder: Any, form: str = "jsonl", count: int = 6, **changes: Any) -> int:
    """Predicts what is not there; returns how many records were computed."""
    numbers = Numbers(count)
    predict(numbers, numbers, job(folder, form, **changes))
    return numbers.computed


def content(folder: Path) -> dict[str, bytes]:
    own = (".lock", ".sums-")
    return {p.name: p.read_bytes() for p in folder.glob("*") if not p.name.startswith(own)}


def flip(path: Path, place: int, bits: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def check_damage(folder: Path, name: str, form: str, count: int = 6, per_shard: int = 2) -> None:
    """Checks that a damage is named, that the file is written again, and that no other is."""
    assert any(name in problem for problem in verify(str(folder))) or name.startswith(".sums-")
    computed = predicted(folder, form, count, records_per_shard=per_shard)
    assert computed == (per_shard if name.startswith("predictions-") else 0)
    assert verify(str(folder)) == []


@pytest.fixture(params=FORMATS)
def form(request) -> str:
    return request.param


@pytest.fixture
def no_sync(monkeypatch):
    """Leaves out what makes files durable, of which these tests would do tens of thousands."""
    monkeypatch.setattr(files.os, "fsync", lambda _: None)


@pytest.mark.exhaustive
def test_every_byte_of_an_output_is_vouched_for(tmp_path, form, no_sync):
    predicted(tmp_path, form)
    whole, draw = content(tmp_path), random.Random(0)
    for path in sorted(tmp_path.glob("*")):
        data = path.read_bytes() if path.name != ".lock" else b""
        for place in range(len(data)):
            path.write_bytes(data)  # that of the sums grows
            flip(path, place, draw.randrange(1, 256))
            check_damage(tmp_path, path.name, form)
            assert content(tmp_path) == whole


@pytest.mark.slow
def test_a_thousand_flipped_bits_are_found_and_written_again(tmp_path, form, no_sync):
    size = {"count": 300, "records_per_shard": 50}
    predicted(tmp_path, form, **size)
    whole, draw = content(tmp_path), random.Random(1)
    for _ in range(1000):
        path = tmp_path / draw.choice(sorted(whole))
        flip(path, draw.randrange(path.stat().st_size), 1 << draw.randrange(8))
        check_damage(tmp_path, path.name, form, 300, 50)
        assert content(tmp_path) == whole


@pytest.mark.parametrize("name", ["predictions-00001-of-00003", "plan", "manifest", ".sums-1-of-1"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "longer"])
def test_a_damaged_file_is_named_and_written_again(tmp_path, caplog, form, name, damage):
    predicted(tmp_path, form)
    whole = content(tmp_path)
    [path] = [path for path in tmp_path.iterdir() if path.name.startswith(name)]
    data = path.read_bytes()
    flipped = bytes([data[0] ^ 1]) + data[1:]
    changed = {"flipped": flipped, "truncated": data[:-1], "empty": b"", "longer": data + b"\n"}
    path.write_bytes(changed[damage])
    check_damage(tmp_path, path.name, form)
    assert content(tmp_path) == whole
    assert path.name in caplog.text or name in ("manifest", ".sums-1-of-1")


def test_a_shard_that_is_damaged_before_all_are_there_is_found(tmp_path):
    predicted(tmp_path, machine=(1, 2))
    flip(tmp_path / "predictions-00002-of-00003.jsonl", 20, 1)
    assert predicted(tmp_path, machine=(2, 2)) == 2
    assert verify(str(tmp_path)) == [
        "predictions-00002-of-00003.jsonl is not what was written (CRC32C)"
    ]
    assert predicted(tmp_path, machine=(1, 2)) == 2
    assert verify(str(tmp_path)) == []


def test_predictions_of_a_version_without_checksums_are_taken_as_they_are(tmp_path, caplog):
    predicted(tmp_path)
    whole = content(tmp_path)
    for name in "plan.json", "manifest.json":
        record = json.loads((tmp_path / name).read_text())
        del record["crc32c"]
        for shard in record.get("shards", []):
            del shard["bytes"], shard["crc32c"]
        (tmp_path / name).write_text(json.dumps(record, indent=1))
    (tmp_path / ".sums-1-of-1.crc").unlink()
    with pytest.raises(UserError, match="has no checksums"):
        verify(str(tmp_path))
    with pytest.raises(UserError, match=r"already holds other .* of = 'x'; now it is 'y'"):
        predicted(tmp_path, plan={"of": "y"})
    assert predicted(tmp_path) == 0
    assert "3 files that an earlier version of tftpu wrote without checksums" in caplog.text
    assert verify(str(tmp_path)) == []
    assert content(tmp_path) == whole


def test_predictions_that_are_not_complete_are_not_vouched_for(tmp_path):
    predicted(tmp_path, machine=(1, 2))
    with pytest.raises(UserError, match="not complete"):
        verify(str(tmp_path))


def test_another_plan_is_refused_though_the_plan_is_damaged(tmp_path):
    predicted(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    flip(tmp_path / "copy" / "plan.json", 0, 1)
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        predicted(tmp_path / "copy", plan={"of": "y"})


@pytest.mark.slow
def test_objects_of_a_bucket_are_compared_by_the_checksums_that_it_keeps(tmp_path, caplog):
    with gs_proxy.bucket(tmp_path) as (service, _):
        assert predicted("gs://bucket/p") == 6
        name = "p/predictions-00001-of-00003.jsonl"
        whole = service.content(name)
        service.overwrite(name, whole[:-5])
        wrong = f"predictions-00001-of-00003.jsonl has {len(whole) - 5} bytes"
        assert [wrong in problem for problem in verify("gs://bucket/p")] == [True]
        assert predicted("gs://bucket/p") == 2
        assert "gs://bucket/p has damaged files" in caplog.text
        assert service.content(name) == whole and verify("gs://bucket/p") == []
