"""Other machines prepare the data: the stream is the same, and they do nothing else for anyone."""

import json
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.support import warm
from tests.support.data import data_sets
from tftpu import input_pipelines
from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines import service, serving
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.sources import Records

FEATURES = {"x": Feature("int32")}


@pytest.fixture
def serve():
    """Returns a function that serves a data set on loopback, and returns the address."""
    servers = []

    def start(served) -> str:
        server = serving.Server(served, "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def data(folder, **changes) -> Records:
    given = {"features": ("x",), "label": "", "global_batch_size": 6, "shuffle": 8}
    return Records(data_dir=str(folder), **{**given, **changes})


def write(folder, bad=()):
    examples = [{"x": i} for i in range(40)]
    for number in bad:
        examples[number] = b"\x07"
    data_sets.shards(folder, FEATURES, {"train": data_sets.split(examples, 11, 13, 9, 7)})


def stream(pipeline, *place) -> list[np.ndarray]:
    return list(pipeline.starting_at(*place).take(20).as_numpy_iterator())


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.slow) for place in ((4, 1, 2), (0, 0, 1))]
)
def test_two_machines_give_the_stream_of_one_process_from_any_step(tmp_path, serve, place):
    write(tmp_path)
    alone = input_pipelines.training(data(tmp_path), seed=2)
    machines = ",".join(serve(data(tmp_path)) for _ in range(2))
    served = input_pipelines.training(data(tmp_path, service=machines), seed=2)
    assert np.array_equal(stream(served, *place), stream(alone, *place))


@pytest.mark.slow
def test_the_command_serves_a_config(tmp_path):
    write(tmp_path)
    (tmp_path / "rows.py").write_text(
        "import tftpu\nfrom tftpu.input_pipelines.sources import Records\n"
        "def get_config():\n"
        f"    data = Records(data_dir={str(tmp_path)!r}, features=('x',), label='',\n"
        "        global_batch_size=6, shuffle=8)\n"
        "    model = tftpu.models.config('resnet50', norm_batch=6)\n"
        "    return tftpu.Experiment(model=model, data=data)\n"
    )
    command = [sys.executable, "-m", "tftpu.launch.main", "data", "serve"]
    command += [f"--config={tmp_path}/rows.py", "--host=127.0.0.1", "--port=0"]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = next(line for line in process.stdout if line.startswith("127.")).strip()
            served = input_pipelines.training(data(tmp_path, service=address), seed=2)
            alone = input_pipelines.training(data(tmp_path), seed=2)
            assert np.array_equal(stream(served, 3), stream(alone, 3))
        finally:
            process.kill()


@pytest.mark.slow
def test_a_bad_record_is_named_across_the_service(tmp_path, serve):
    write(tmp_path, bad=[14])
    served = input_pipelines.training(data(tmp_path, service=serve(data(tmp_path))))
    with pytest.raises(tf.errors.OpError, match=f"UserError: record 3 of {tmp_path}/train-00001"):
        list(served.starting_at(0).take(8))


@pytest.mark.slow
def test_a_machine_that_dies_ends_the_run_with_a_clear_error(tmp_path, monkeypatch):
    write(tmp_path)
    pipeline = data(tmp_path).training(DataContext(0, 6))
    spec = pipeline.starting_at(0).element_spec

    def die(listening):
        for part in range(2):  # the first one only looks
            connection, _ = listening.accept()
            connection.recv(10_000)
            answer = {"parts": service.describe_shapes(tf.nest.flatten(spec))}
            connection.sendall(json.dumps(answer).encode() + b"\n" + (b"B" if part else b""))
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=die, args=[listening], daemon=True).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        served = input_pipelines.training(data(tmp_path, service=address))
        with pytest.raises(tf.errors.OpError, match=r"ended .*run the same command to resume"):
            list(served.starting_at(0).take(2))


@pytest.mark.medium
def test_an_address_without_a_service_fails_with_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "PATIENCE", 0.6)
    write(tmp_path)
    alone = input_pipelines.training(data(tmp_path, service="127.0.0.1:9"))
    with pytest.raises(UserError, match=r"no data service at 127.0.0.1:9 .*refused"):
        alone.starting_at(0)


@pytest.mark.medium
def test_another_data_set_than_the_servers_is_refused(tmp_path, serve):
    write(tmp_path)
    address = serve(data(tmp_path, shuffle=9))
    served = input_pipelines.training(data(tmp_path, service=address))
    with pytest.raises(UserError, match=r"data\.shuffle is 9 for the service and 8 on the train"):
        served.starting_at(0)


@pytest.mark.parametrize("address", ["localhost", "grpc://a:1", "a:1, b:1", "a:123456"])
def test_an_incomplete_address_fails(address):
    with pytest.raises(UserError, match="as HOST:PORT"):
        data("/tmp", service=address).validate()


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b'{"version": 1}\n',
        b"\xff" * 100 + b"\n",
        b"null\n",
    ],
)
def test_anything_else_gets_an_error_and_the_server_answers_the_next(tmp_path, serve, line):
    write(tmp_path)
    address = serve(data(tmp_path))
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(line)
        assert (
            "the request is for something else"
            in json.loads(connection.makefile().readline())["error"]
        )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\n")
        assert connection.recv(1)


@pytest.mark.parametrize("numbers", [{"step": -1}, {"hosts": 0}, {"machine": 1}, {"seed": True}])
def test_numbers_that_no_run_has_are_refused(tmp_path, numbers):
    asked = {"version": "1", "data": {}, "seed": 0, "step": 0, "host": 0, "hosts": 1}
    asked |= {"machine": 0, "machines": 1}
    serving._parse_request(json.dumps(asked).encode())
    with pytest.raises(UserError):
        serving._parse_request(json.dumps(asked | numbers).encode())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "2001:4860:4860::8888"])
def test_a_public_address_needs_a_flag_that_names_the_risk(tmp_path, host):
    with pytest.raises(UserError, match=r"can read the training data.*--allow_network"):
        serving.Server(data(tmp_path), host, 0)


def test_it_listens_at_the_given_address_alone(tmp_path):
    with serving.Server(data(tmp_path), "127.0.0.1", 0) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
    with serving.Server(data(tmp_path), "0.0.0.0", 0, allow_network=True) as server:
        assert server.socket.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.99", "a b"])
def test_an_address_of_no_machine_or_another_one_fails_with_a_clear_error(tmp_path, host):
    with pytest.raises(UserError, match=r"--host=|Cannot listen at"):
        serving.Server(data(tmp_path), host, 0)
