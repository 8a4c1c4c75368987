"""Loads `tftpu serve` on loopback, beside calling the same model directly in its process.

    python -m tests.benchmarks.serving [--requests=2000] [--turns=3]

The model is ViT-S/16 with 4 layers and 96x96 pixels, or with --small the one of digits_resnet, of
random weights, exported to ONNX. Clients send one image in each request, as
JSON or as a PNG in base64, over connections that stay open. Directly called, the model gets the
same images one by one, and in batches of 64. All take turns. The clients share the machine's cores
with the server.

Evidence: executed, on this machine's CPU.
"""

import argparse
import base64
import concurrent.futures
import http.client
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from PIL import Image

CLIENTS = (1, 8, 32)
_MAIN = "from tftpu.launch.main import run; run()"


def main() -> None:
    """Prints latencies and throughputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        shape = exported(path, given.small)
        images = np.random.default_rng(0).integers(0, 256, (64, *shape), np.uint8)
        command = [sys.executable, "-c", _MAIN, "serve", f"--model={path}", "--port=0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
            for _ in range(given.turns):
                _direct(path, images, given.requests)
                for clients in CLIENTS:
                    for form in _json, _png:
                        _load(port, [form(image) for image in images], clients, given.requests)
            server.terminate()


def exported(path: str, small: bool) -> tuple[int, ...]:
    """Exports a model; returns the shape of its images."""
    from tftpu import models
    from tftpu.inference.exporting import export
    from tftpu.inference.exporting.inputs import Input
    from tftpu.inference.exporting.serving import Serving
    from tftpu.launch.settings.config_flags import load

    large = {"pooling": "mean", "layers": 4, "image_size": 96}
    config = load("digits_resnet", []).model if small else models.config("vit_s16", **large)
    model: Any = models.build(config)
    shape = tuple(model.input.shape[1:])
    inputs = [Input("images", shape, "uint8")]

    def prepared(pixels: Any) -> Any:
        import keras

        return keras.ops.cast(pixels, "float32") / 127.5 - 1

    export.onnx(Serving(model, inputs, prepared), path, {})
    return shape


def _json(image: np.ndarray) -> bytes:
    return json.dumps({"instances": [image.tolist()]}).encode()


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.squeeze()).save(file, "PNG")
    encoded = base64.b64encode(file.getvalue()).decode()
    return json.dumps({"instances": [{"b64": encoded}]}).encode()


def _direct(path: str, images: np.ndarray, requests: int) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    for size in 1, 64:
        spent = []
        for first in range(0, requests, size):
            start = time.perf_counter()
            place = first % len(images)
            session.run(None, {"images": images[place : place + size]})
            spent.append(time.perf_counter() - start)
        _print(f"direct, batches of {size}", spent, size * len(spent) / sum(spent))


def _load(port: int, bodies: list[bytes], clients: int, requests: int) -> None:
    each = max(requests // clients, 1)
    processes = min(clients, 2)
    arguments = [(port, bodies, clients // processes, each)] * processes
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.starmap(_clients, arguments, 1)
    spent = [end - start for part in found for start, end in part]
    seconds = max(e for part in found for _, e in part) - min(s for part in found for s, _ in part)
    form = "PNG" if b"b64" in bodies[0][:40] else "JSON"
    _print(f"served, {clients} clients, {form}", spent, len(spent) / seconds)


def _clients(port: int, bodies: list[bytes], clients: int, each: int) -> list[tuple[float, float]]:
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        found = pool.map(lambda number: _client(port, bodies, number, each), range(clients))
        return [times for part in found for times in part]


def _client(
    port: int, bodies: list[bytes], number: int, requests: int
) -> list[tuple[float, float]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    spent = []
    for index in range(requests):
        start = time.perf_counter()
        connection.request("POST", "/predict", bodies[(number + index) % len(bodies)])
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        spent.append((start, time.perf_counter()))
    return spent


def _print(name: str, spent: list[float], throughput: float) -> None:
    p50, p99 = statistics.median(spent), float(np.percentile(spent, 99))
    print(f"{name:28} p50 {1e3 * p50:8.2f} ms  p99 {1e3 * p99:8.2f} ms  {throughput:8.0f}/s")


if __name__ == "__main__":
    main()
