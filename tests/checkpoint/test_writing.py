"""Several hosts write one checkpoint, as threads that share a store in memory."""

import time

import pytest

from tests.support.fakes.checkpoint_hosts import COUNT, hosts_of, save
from tftpu.checkpoint import manifest
from tftpu.checkpoint.store import Best
from tftpu.storage import files


def test_each_host_writes_its_part_and_any_division_reads_them(tmp_path):
    assert save(hosts_of(tmp_path, 7.0), 5, Best("loss", 1.0)) == [None] * COUNT
    folder = tmp_path / "checkpoints" / "5"
    names = sorted(path.name.split("-")[:2] for path in folder.glob("model*"))
    assert names == [["model", "1"], ["model", "2"], ["model.safetensors"]]
    assert [path.name for path in folder.glob("ema*")] == ["ema.safetensors"]
    again = hosts_of(tmp_path)
    for index, host in enumerate(again):
        assert host.checkpoints.find_best() == 5
        assert host.checkpoints.restore(host.leaves).step == 5
        assert (host.kernel == 7 + index).all()
        assert (host.bias == 7).all()


@pytest.mark.parametrize("broken", [0, 2])
def test_a_host_that_cannot_write_leaves_the_older_checkpoint(tmp_path, monkeypatch, broken):
    hosts = hosts_of(tmp_path)
    assert save(hosts, 1) == [None] * COUNT
    write, name = files.write_whole, f"model-{broken}-" if broken else "model.safetensors"

    def fail(path, data):
        if f"/2/{name}" in str(path):
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(files, "write_whole", fail)
    reasons = save(hosts, 2)
    assert all("No space left on device" in reason for reason in reasons)
    assert manifest.list_steps(str(tmp_path / "checkpoints")) == [1]
    monkeypatch.undo()
    assert save(hosts, 3) == [None] * COUNT  # training continued
    assert manifest.list_steps(str(tmp_path / "checkpoints")) == [1, 3]


def test_a_save_that_fails_before_it_writes_leaves_the_checkpoint_of_its_step(tmp_path):
    def refuse() -> None:
        raise OSError(13, "Permission denied")

    hosts = hosts_of(tmp_path)
    assert save(hosts, 1) == [None] * COUNT
    reasons = save(hosts, 1, first=refuse)
    assert all("Permission denied" in reason for reason in reasons)
    assert manifest.list_steps(str(tmp_path / "checkpoints")) == [1]


def test_a_host_with_another_disk_is_named(tmp_path, monkeypatch):
    hosts, write = hosts_of(tmp_path / "shared"), files.write_whole

    def to_own_disk(path, data):
        write(str(path).replace("shared", "own") if "model-1-" in str(path) else path, data)

    monkeypatch.setattr(files, "write_whole", to_own_disk)
    reasons = save(hosts, 1)
    assert "host 1 wrote model-1-" in reasons[0]
    assert "all hosts must see the same workdir" in reasons[2]
    assert manifest.list_steps(str(tmp_path / "shared" / "checkpoints")) == []


def test_a_host_that_is_lost_while_saving_leaves_the_older_checkpoint(tmp_path):
    hosts = hosts_of(tmp_path)
    assert save(hosts, 1) == [None] * COUNT
    for host in hosts[:2]:  # the third never begins
        host.checkpoints.save(2, host.leaves, {})
    end = time.monotonic() + 20
    while not list((tmp_path / "checkpoints" / "2").glob("model-1-*")):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert manifest.list_steps(str(tmp_path / "checkpoints")) == [1]
    again = hosts_of(tmp_path, 9.0)
    assert save(again, 2) == [None] * COUNT  # another run, over what is left
    assert manifest.list_steps(str(tmp_path / "checkpoints")) == [1, 2]
