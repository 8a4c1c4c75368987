"""Lost hosts are noticed by what they show in a store; parts of a batch by the devices of hosts."""

import socket
import threading
import time
import types
from collections import namedtuple

import jax
import numpy as np
import pytest

from tests.support.fakes.host_texts import Texts
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.processes import coordination, watch
from tftpu.engines.jax.processes import hosts as jax_hosts
from tftpu.errors import HostLost, UserError
from tftpu.runtime.hosts import Task

SECONDS = 1.2


@pytest.fixture
def ended(monkeypatch):
    """Returns the sentences with which processes would have ended."""
    sentences: list[str] = []
    monkeypatch.setattr(watch.hosts, "exit_as_lost", sentences.append)
    return sentences


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.medium
def test_hosts_that_live_are_not_lost_and_leave_together(ended):
    store = Texts()
    both = [watch.Watch(store, index, 2, SECONDS) for index in (0, 1)]
    with both[0].together(), both[1].together():
        time.sleep(2 * SECONDS)
    left: list[bool] = []
    threads = [threading.Thread(target=lambda w=w: left.append(w.leave(10.0))) for w in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [True, True]
    assert not ended


@pytest.mark.medium
def test_a_host_that_shows_no_sign_of_life_is_lost(ended):
    watching = watch.Watch(Texts(), 0, 2, SECONDS)
    wait_until(lambda: ended)
    assert "Host 1 was lost: no sign of life" in ended[0]
    assert watching.leave(10.0) is False


@pytest.mark.medium
def test_a_store_that_does_not_answer_means_that_the_first_host_is_lost(ended):
    class Silent(Texts):
        def put(self, name, text):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    watching = watch.Watch(Silent(), 1, 2, SECONDS)
    wait_until(lambda: ended)
    assert "Host 0 was lost: it has not answered" in ended[0]
    watching.leave(0.1)


@pytest.mark.medium
def test_a_host_that_ends_while_another_trains_is_lost(ended):
    store = Texts()
    watching = watch.Watch(store, 0, 2, SECONDS)
    store.put("hosts/1", "left")
    time.sleep(2 * SECONDS)
    assert not ended  # this one may have its own work
    with watching.together():
        wait_until(lambda: ended)
    assert "Host 1 ended while this one was waiting for it" in ended[0]
    watching.leave(1.0)


def test_texts_pass_from_all_hosts_to_the_chief_and_back():
    store = Texts()
    exchanges = [
        jax_hosts.StoreExchange(types.SimpleNamespace(store=store, index=index, count=3))
        for index in range(3)
    ]
    found: dict[int, list] = {0: [], 1: [], 2: []}

    def work(index: int) -> None:
        for save in ("a", "b"):  # a name may be used again
            found[index].append(exchanges[index].collect("save", f"{save}{index}"))
            found[index].append(exchanges[index].announce("save", f"done {save}"))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found[0] == [["a0", "a1", "a2"], "done a", ["b0", "b1", "b2"], "done b"]
    assert found[1] == found[2] == [[], "done a", [], "done b"]


def test_a_slice_of_several_hosts_is_found_by_jax(monkeypatch):
    kinds = coordination.clusters.ClusterEnv._cluster_types
    assert {"gcetpu", "gketpu"} <= {kind.name for kind in kinds}

    def kind(name: str, count: int):
        return types.SimpleNamespace(
            name=name,
            is_env_present=lambda: True,
            get_process_count=lambda: count,
            get_process_id=lambda: 2,
            get_coordinator_address=lambda timeout, port: "10.0.0.1:8482",
        )

    for count, expected in ((4, Task(2, 4)), (1, Task())):
        kinds = [kind("slurm", 9), kind("gcetpu", count)]
        monkeypatch.setattr(coordination.clusters.ClusterEnv, "_cluster_types", kinds)
        assert coordination.find_slice_task() == expected
        if count > 1:
            assert coordination.find_slice_task().coordinator == "10.0.0.1:8482"


def test_a_tpu_without_a_metadata_server_is_that_of_one_host(monkeypatch):
    def unanswered() -> bool:
        raise ConnectionError("metadata.google.internal")

    kinds = [types.SimpleNamespace(name="gcetpu", is_env_present=unanswered)]
    monkeypatch.setattr(coordination.clusters.ClusterEnv, "_cluster_types", kinds)
    assert coordination.find_slice_task() == Task()


def test_a_slice_whose_first_host_has_no_address_is_a_lost_host(monkeypatch):
    def unknown(timeout, port) -> str:
        raise RuntimeError("Failed to recognize coordinator address host-0")

    kind = types.SimpleNamespace(
        name="gcetpu",
        is_env_present=lambda: True,
        get_process_count=lambda: 2,
        get_coordinator_address=unknown,
    )
    monkeypatch.setattr(coordination.clusters.ClusterEnv, "_cluster_types", [kind])
    with pytest.raises(HostLost, match=r"Host 0 of the slice was not found.*host-0"):
        coordination.find_slice_task()


def test_a_port_that_is_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot serve the other hosts at port {port}"):
            coordination._serve(Task(0, 2, f"127.0.0.1:{port}"))


Device = namedtuple("Device", "id process_index slice_index platform", defaults=(0, "tpu"))


def mesh(hosts: int, each: int, **sizes: int):
    """Returns a mesh in the order of devices that a TPU has, hosts taking turns."""
    devices = [Device(i, i % hosts) for i in range(hosts * each)]
    axes = {"data": 1, "fsdp": 1, "tensor": 1} | sizes
    grid = np.empty(len(devices), object)
    grid[:] = meshes.sort_devices(devices)
    return types.SimpleNamespace(shape=axes, devices=grid.reshape(tuple(axes.values())))


@pytest.mark.parametrize(
    ("hosts", "each", "sizes", "parts"),
    [
        (1, 8, {"fsdp": 8}, [(0, 1)]),
        (4, 2, {"data": 2, "fsdp": 4}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (2, 4, {"fsdp": 4, "tensor": 2}, [(0, 2), (1, 2)]),
        (2, 2, {"tensor": 4}, [(0, 1), (0, 1)]),
        (4, 2, {"fsdp": 2, "tensor": 4}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_a_host_feeds_the_examples_of_its_devices(hosts, each, sizes, parts):
    grid = mesh(hosts, each, **sizes)
    found = [meshes.find_batch_shard(grid, process) for process in range(hosts)]
    assert [(part.index, part.count) for part in found] == parts


def test_devices_of_a_slice_are_next_to_each_other_and_only_data_leaves_it():
    # Processes are numbered across slices here, and so are not in their order.
    devices = [Device(i, i % 4, slice_index=i % 2) for i in range(8)]
    found = [(d.slice_index, d.process_index) for d in meshes.sort_devices(devices)]
    assert found == [(0, 0)] * 2 + [(0, 2)] * 2 + [(1, 1)] * 2 + [(1, 3)] * 2
    sizes = {"data": 1, "fsdp": 8, "sequence": 1, "tensor": 1}
    with pytest.raises(UserError, match=r"There are 2 slices.* as in 'data:2,fsdp:-1'"):
        meshes.make(sizes, devices)


def test_a_model_cannot_be_shared_by_a_host_and_a_part_of_another():
    with pytest.raises(
        UserError, match=r"has 3 devices for each shard .* and each host has 2 device"
    ):
        meshes.find_batch_shard(mesh(3, 2, data=2, tensor=3), 1)
