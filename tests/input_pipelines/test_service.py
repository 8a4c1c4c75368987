"""A tf.data service prepares the data, and the stream is the same as without it."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.support import data_sets
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines import service
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.sources import Records

FEATURES = {"x": Feature("int32")}


@pytest.fixture(scope="module")
def machines():
    """Yields the addresses of two services, each in a process started as a user would."""
    command = [sys.executable, "-m", "tftpu.input_pipelines.service", "--port=0"]
    command += ["--host=localhost"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        yield ",".join(process.stdout.readline().strip() for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def data(folder, **changes) -> Records:
    given = {"features": ("x",), "label": "", "global_batch_size": 6, "shuffle": 8}
    return Records(data_dir=str(folder), **{**given, **changes})


def write(folder, bad=()):
    examples = [{"x": i} for i in range(40)]
    for number in bad:
        examples[number] = b"\x07"
    data_sets.shards(folder, FEATURES, {"train": data_sets.split(examples, 11, 13, 9, 7)})


@pytest.mark.slow
def test_two_machines_give_the_stream_of_one_process_from_any_step(tmp_path, machines):
    write(tmp_path)
    alone = input_pipelines.training(data(tmp_path), seed=2)
    served = input_pipelines.training(data(tmp_path, service=machines), seed=2)
    assert served.starting_at(0).element_spec == alone.starting_at(0).element_spec
    for step, host, hosts in ((0, 0, 1), (4, 1, 2)):
        expected = alone.starting_at(step, host, hosts).take(20).as_numpy_iterator()
        found = served.starting_at(step, host, hosts).take(20).as_numpy_iterator()
        assert np.array_equal(list(found), list(expected))


def test_a_bad_record_is_named_across_the_service(tmp_path, machines):
    write(tmp_path, bad=[14])
    served = input_pipelines.training(data(tmp_path, service=machines))
    with pytest.raises(tf.errors.OpError, match=f"record 3 of {tmp_path}/train-00001"):
        list(served.starting_at(0).take(8))


def test_an_address_without_a_service_fails_with_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "PATIENCE", 0.6)
    write(tmp_path)
    alone = input_pipelines.training(data(tmp_path, service="grpc://127.0.0.1:9"))
    with pytest.raises(UserError, match=r"no tf.data service at grpc://127.0.0.1:9 .*refused"):
        alone.starting_at(0)


@pytest.mark.parametrize("address", ["localhost:5000", "grpc://a", "grpc://a:1, grpc://b:1"])
def test_an_incomplete_address_fails(address):
    with pytest.raises(UserError, match="grpc://HOST:PORT"):
        data("/tmp", service=address).validate()
