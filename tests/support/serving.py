"""A server of small models on loopback, in a thread of the test."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tests.support.models.generation import language_model
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.exporting.serving import Serving
from tftpu.inference.server import run
from tftpu.inference.server.answering import Limits
from tftpu.inference.server.app import About
from tftpu.inference.server.origins import LOOPBACK
from tftpu.inference.server.protocol import TimeoutProtocol
from tftpu.inference.server.served import Served
from tftpu.inference.server.text import Language
from tftpu.inference.writer import Writer

SHAPE = (6, 4, 3)
CLASSES = ["cat", "dog", "eel"]


def images() -> Served:
    """Returns a classifier of pixels."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model: Any = keras.Sequential(
        [keras.Input(SHAPE), layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(3)]
    )
    given = [Input("images", SHAPE, "uint8")]
    serving = Serving(model, given, lambda x: keras.ops.cast(x, "float32"), CLASSES)
    return Served(serving.inputs, tuple(serving.output_specs()), serving.outputs)


def letters() -> Language:
    """Returns a language model of bytes, with random weights."""
    model = language_model("gpt", vocabulary=128, layers=1)

    def decoder(prompt: Any) -> Any:
        return lambda tokens: bytes(tokens).decode("ascii")

    writer = Writer(model, stop=0)
    context = writer.programs.decoding.context
    return Language(writer, lambda t: list(t.encode("ascii", "replace")), decoder, 128, context)


@contextlib.contextmanager
def running(
    model: Served | Language,
    protocol: type[asyncio.Protocol] = TimeoutProtocol,
    hosts: tuple[str, ...] = LOOPBACK,
    compiled: Callable[[int, float], None] | None = None,
    **limits: Any,
) -> Iterator[int]:
    """Serves a model under the name "m"; yields the port. Only with `compiled` compiles ahead."""
    at = run.bind_socket("127.0.0.1", 0)
    run.listen(at)
    about = About(name="m", hosts=hosts)
    server = run.build_server(model, about, Limits(**limits), protocol=protocol, compiled=compiled)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield at.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        at.close()
        assert not thread.is_alive()


JSON = {"Content-Type": "application/json"}


def ask(
    port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] = JSON
) -> tuple[int, Any]:
    """Returns the status and the JSON, or the bytes, of an answer.

    Args:
        port: of the server.
        method: such as "POST".
        path: such as "/predict".
        body: bytes, or what is sent as JSON.
        headers: beside those of every request; "Host" replaces the usual one.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, sent, dict(headers))
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    as_json = answer.getheader("content-type") == "application/json"
    return answer.status, json.loads(read) if as_json else read


def wait_for_waiting(port: int, count: int) -> None:
    """Waits until `count` examples, or texts, wait for the model of a server."""
    while f"tftpu_waiting {count:.1f}" not in ask(port, "GET", "/metrics")[1].decode():
        time.sleep(0.01)


def pixels(count: int, seed: int = 0) -> np.ndarray:
    """Returns images for `images`."""
    return np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), np.uint8)


def head_of_post(size: int) -> bytes:
    """Returns the head of a request with a body of some bytes."""
    lines = ["Host: localhost", "Content-Type: application/json", f"Content-Length: {size}"]
    return "\r\n".join(["POST /predict HTTP/1.1", *lines, "", ""]).encode()
