"""A thousand requests that were made to harm the server."""

import collections
import concurrent.futures
import re
import resource
import socket

import pytest

from tests.support import serving
from tests.support.hostile import requests as hostile_requests
from tests.support.serving import ask, head_of_post, pixels, running

REQUESTS = 500  # to each kind of model


def status_of(port: int, request: bytes) -> int:
    """Returns the status of the answer; 0 if none came before one of both closed the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.5) as connection:
        try:
            connection.sendall(request)
            answer = connection.recv(100)
        except OSError:  # closed while it was sent, or the server waits for the rest of a request
            return 0
    found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    assert found or not answer, answer
    return int(found[1]) if found else 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "letters"])
def test_no_request_ends_the_server_or_is_its_fault(kind):
    model = getattr(serving, kind)()
    paths = ["/predict", "/v1/models/m:predict", "/v1/completions"][: 2 if kind == "images" else 3]
    good = {"instances": pixels(1).tolist() if kind == "images" else ["abc"]}
    if kind == "letters":
        good["parameters"] = {"temperature": 0}
    requests = [
        hostile_requests.drawn(number, paths[number % len(paths)]) for number in range(REQUESTS)
    ]
    with running(model, body=2**20, seconds=30.0, batch=16) as port:
        expected = ask(port, "POST", "/predict", good)
        assert expected[0] == 200
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        idle[0].sendall(head_of_post(9) + b"{")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = collections.Counter(pool.map(lambda r: status_of(port, r), requests))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 2**20, f"{grown} KiB"  # 1 GiB; bodies may have 1 MiB
        assert ask(port, "POST", "/predict", good) == expected
        assert ask(port, "GET", "/health") == (200, {})
        for connection in idle:
            connection.close()
    assert not [status for status in found if status >= 500], found
    assert found[0] < REQUESTS / 5, found  # those that say they go on, and do not
    assert found[400] > REQUESTS / 3 and found[404] and found[413], found
