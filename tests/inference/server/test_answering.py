"""Clients that would take the server's memory, its connections, or its time."""

import concurrent.futures
import contextlib
import gc
import json
import os
import signal
import socket
import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import uvicorn

from tests.support import serving
from tests.support.serving import SHAPE, ask, head_of_post, running
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server import payloads, run
from tftpu.inference.server.answering import Limits
from tftpu.inference.server.answers import BadRequest
from tftpu.inference.server.app import About
from tftpu.inference.server.protocol import TimeoutProtocol
from tftpu.inference.server.served import Refused, Served

DOUBLE = Served((Input("x", (), "int32"),), ("y",), lambda given: {"y": given["x"] * 2})


class Hasty(TimeoutProtocol):
    """The protocol with little patience."""

    head_s, rest_s = 0.5, 0.5


@pytest.mark.parametrize("values", [["a" * 2**20, *["b"] * 300], [["a" * 2**20]] * 300])
def test_texts_where_numbers_belong_take_no_memory(values):
    given = Input("x", () if isinstance(values[0], str) else (1,), "float32")
    tracemalloc.start()
    with pytest.raises(BadRequest, match=r"something else, such as 'aaa"):
        payloads.parse_request({"instances": values}, [given])
    assert tracemalloc.get_traced_memory()[1] < 2 * 2**20  # 1.2 GB as an array of NumPy
    tracemalloc.stop()


def test_images_that_would_unpack_to_gigabytes_are_refused():
    given = Input("x", (4096, 4096, 3), "uint8")
    with pytest.raises(BadRequest, match=r"have 288 MiB once unpacked: send fewer"):
        payloads.parse_request({"instances": [{"b64": "AAAA"}] * 6}, [given])


@pytest.mark.parametrize(
    ("instance", "many"),
    [("[[]]", "lists and objects"), ("[" * 900 + "]" * 900, "lists and objects"), ("1", "values")],
)
def test_a_body_that_would_become_many_objects_is_refused_before_it_does(instance, many):
    instances = ",".join([instance] * (10**6 // (len(instance) + 1)))
    body = f'{{"instances":[{instances}]}}'.encode()
    tracemalloc.start()
    try:
        payloads.parse_body(body, 10**6)
    except BadRequest as error:
        assert f" {many}, and may have " in str(error)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10**5  # 60 times the body as objects


@pytest.fixture
def no_collector():
    """Frees only what nothing refers to, as the collector does between its rare rounds."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["an object", "refused", "a failure", "a timeout"])
def test_a_request_that_got_an_error_leaves_nothing_behind(no_collector, monkeypatch, fault):
    monkeypatch.setattr(payloads.gc, "enable", lambda: None)  # not by the server, either
    count, gate = 60_000, threading.Event()

    def call(given: Any) -> Any:
        if fault == "refused":
            raise Refused("not this one")
        if fault == "a failure":
            raise ZeroDivisionError
        if fault == "a timeout":
            assert gate.wait(30)
        return {"y": given["x"]}

    body = {"instances": [{}] * count if fault == "an object" else [7] * count}
    limits = {"batch": count, "seconds": 0.5 if fault == "a timeout" else 60.0, "waiting": count}
    expected = {"an object": 400, "refused": 400, "a failure": 500, "a timeout": 504}[fault]
    with running(Served(DOUBLE.inputs, ("y",), call), **limits) as port:
        for turn in range(5):
            status, _ = ask(port, "POST", "/predict", body)
            assert status == expected
            if turn == 0:  # what the libraries keep for good is there
                tracemalloc.start()
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        gate.set()
    assert kept < 4 * count * 2, f"{kept:,} bytes"  # the arrays alone are 4 * count, each time


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bool"])
def test_numbers_of_any_rank_are_those_of_numpy(dtype):
    for shape in (), (3,), (2, 1), SHAPE:
        values = np.random.default_rng(0).integers(0, 2, (5, *shape)).astype(dtype)
        found = payloads.parse_request({"instances": values.tolist()}, [Input("x", shape, dtype)])
        np.testing.assert_array_equal(found.arrays["x"], values)
        assert found.arrays["x"].dtype == dtype


def test_a_model_without_memory_asks_for_less():
    def call(given: Any) -> Any:
        raise MemoryError

    with running(Served(DOUBLE.inputs, ("y",), call)) as port:
        status, answer = ask(port, "POST", "/predict", {"instances": [1]})
        assert status == 413 and "lacks the memory" in answer["error"]


def closed(connection: socket.socket) -> bool:
    """Returns whether the server closes a connection within some seconds."""
    connection.settimeout(10)
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHo",
    ],
)
def test_a_connection_without_a_whole_head_is_closed(sent):
    with running(DOUBLE, Hasty) as port, contextlib.ExitStack() as stack:
        address = "127.0.0.1", port
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        for connection in idle:
            connection.sendall(sent)
        assert all(map(closed, idle))


def test_a_body_that_does_not_end_is_closed_after_its_answer():
    with (
        running(DOUBLE, Hasty, body=1000) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
    ):
        head = head_of_post(1000000000)
        connection.sendall(head)
        assert b" 413 " in connection.recv(1000)
        end = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < end:
                connection.sendall(b" " * 1000)
                time.sleep(0.01)


@pytest.mark.medium
def test_a_client_that_does_not_read_its_answer_is_closed():
    def call(given: Any) -> Any:
        return {"y": np.zeros((len(given["x"]), 10_000_000), np.uint8)}

    with (
        running(Served(DOUBLE.inputs, ("y",), call), Hasty) as port,
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        body = b'{"instances":[1]}'
        head = head_of_post(len(body))
        connection.sendall(head + body)
        time.sleep(3)
        connection.settimeout(10)
        read = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(2**20):
                read += len(part)
        assert read < 20_000_000  # what the kernel held


@pytest.mark.medium
def test_a_slow_model_is_waited_for():
    def call(given: Any) -> Any:
        time.sleep(1.2)
        return {"y": given["x"]}

    with running(Served(DOUBLE.inputs, ("y",), call), Hasty) as port:
        assert ask(port, "POST", "/predict", {"instances": [1]}) == (200, {"predictions": [1]})


@pytest.mark.medium
def test_a_large_request_ends_with_its_client():
    gate, seen = threading.Event(), []

    def call(given: Any) -> Any:
        seen.append(len(given["x"]))
        assert gate.wait(30)
        return {"y": given["x"]}

    with running(Served(DOUBLE.inputs, ("y",), call), batch=2, seconds=2.0) as port:
        assert ask(port, "POST", "/predict", {"instances": [1] * 20})[0] == 504
        gate.set()
        assert ask(port, "POST", "/predict", {"instances": [5]}) == (200, {"predictions": [5]})
        assert seen == [2, 1]


@pytest.mark.slow
def test_other_models_and_addresses_that_redirect_are_refused():
    with running(serving.letters()) as port:
        body = {"prompt": "a", "max_tokens": 1}
        status, answer = ask(port, "POST", "/v1/completions", {**body, "model": "gpt-4"})
        assert status == 404 and "the only one is 'm'" in answer["error"]["message"]
        assert ask(port, "POST", "/v1/completions", {**body, "model": "m"})[0] == 200
        assert ask(port, "POST", "/predict/", body)[0] == 404


def ends(ready: Any) -> None:
    """Serves, in this thread, until a signal."""
    at = run.bind_socket("127.0.0.1", 0)
    run.listen(at)
    run.serve(DOUBLE, About(name="m"), Limits(), at, ready)


def test_a_signal_ends_the_server_as_soon_as_it_says_that_it_is_ready(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.timeout(60)
def test_a_signal_before_uvicorn_waits_for_signals_ends_it_too(monkeypatch):
    capture = uvicorn.Server.capture_signals

    def late(self: uvicorn.Server) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return capture(self)

    monkeypatch.setattr(uvicorn.Server, "capture_signals", late)
    ends(lambda: None)


def test_what_runs_is_answered_before_the_end():
    gate, seen = threading.Event(), []

    def call(given: Any) -> Any:
        seen.append(1)
        assert gate.wait(30)
        return {"y": given["x"]}

    at = run.bind_socket("127.0.0.1", 0)
    run.listen(at)
    port = at.getsockname()[1]
    asked: list[concurrent.futures.Future] = []

    def late() -> None:
        while not seen:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        gate.set()

    with concurrent.futures.ThreadPoolExecutor() as pool:

        def ready() -> None:
            body = json.dumps({"instances": [3]}).encode()
            asked.append(pool.submit(ask, port, "POST", "/predict", body))
            pool.submit(late)

        run.serve(Served(DOUBLE.inputs, ("y",), call), About(name="m"), Limits(), at, ready)
        assert asked[0].result() == (200, {"predictions": [3]})
