"""Sends `tftpu serve` large requests that it refuses, then good ones: does their memory come back?

    python -m tests.benchmarks.faults.refused_requests [--mib=15] [--count=20] [--good=200]

Each turn starts a server with the model of digits_resnet, of random weights, exported to ONNX; it
sends `--count` bodies of one kind at once, and asks for /health ten times a second meanwhile.
Memory is the server's resident set.

Evidence: executed, on this machine's CPU.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from tests.benchmarks.serving import exported

_MAIN = "from tftpu.launch.main import run; run()"
_JSON = {"Content-Type": "application/json"}
KINDS = {  # an instance, again and again
    "empty objects": "{}",
    "objects": '{"a":0}',
    "empty lists": "[]",
    "deep lists": "[" * 900 + "]" * 900,
    "deep objects": '{"":' * 900 + "0" + "}" * 900,
    "numbers": "1e9",
    "digits": "7",
    "texts": '"aé"',
    "encoded": '{"b64":"AAAA"}',
}


def main() -> None:
    """Prints memory and the slowest answer of /health for each kind of body."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=15)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--good", type=int, default=200)
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        shape = exported(path, small=True)
        image = np.random.default_rng(0).integers(0, 256, shape)
        good = json.dumps({"instances": [image.tolist()]}).encode()
        for kind in given.kinds.split(","):
            with _server(path) as (process, port):
                print(
                    f"{kind:14}", _turn(process, port, _body(KINDS[kind], given.mib), good, given)
                )


@contextlib.contextmanager
def _server(path: str) -> Iterator[tuple[int, int]]:
    """Yields the number of a server's process, and its port."""
    command = [sys.executable, "-c", _MAIN, "serve", f"--model={path}", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.pid, int(server.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
        finally:
            server.terminate()


def _body(instance: str, mib: float) -> bytes:
    count = int(mib * 2**20) // (len(instance.encode()) + 1)
    return ('{"instances":[' + ",".join([instance] * count) + "]}").encode()


def _turn(process: int, port: int, body: bytes, good: bytes, given: argparse.Namespace) -> str:
    for _ in range(10):
        assert _post(port, good) == 200
    start, slowest, over = _resident(process), [0.0], threading.Event()
    watching = threading.Thread(target=_watch, args=(port, slowest, over))
    watching.start()
    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(given.count) as pool:
        statuses = collections.Counter(pool.map(lambda _: _post(port, body), range(given.count)))
    seconds = time.perf_counter() - begun
    over.set()
    watching.join()
    after = _resident(process)
    for _ in range(given.good):
        assert _post(port, good) == 200
    grown, end = _resident(process) - start, _resident(process, "VmHWM") - start
    answers = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    return (
        f"{answers} in {seconds:5.1f} s; from {start:.0f} MiB +{after - start:.0f} after them, "
        f"{grown:+.0f} after {given.good} good ones, {end:+.0f} at the most; "
        f"/health within {slowest[0]:.2f} s"
    )


def _post(port: int, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/predict", body, _JSON)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def _watch(port: int, slowest: list[float], over: threading.Event) -> None:
    while not over.wait(0.1):
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        slowest[0] = max(slowest[0], time.perf_counter() - begun)


def _resident(process: int, field: str = "VmRSS") -> float:
    """Returns the MiB of a process that are in memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) / 2**10


if __name__ == "__main__":
    main()
