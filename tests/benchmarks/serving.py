"""Loads `tftpu serve` on loopback: images, beside calling the model directly; or texts.

    python -m tests.benchmarks.serving [--requests=2000] [--turns=3]
    python -m tests.benchmarks.serving --texts [--context=1024] [--turns=3]

The model is ViT-S/16 with 4 layers and 96x96 pixels, or with --small the one of digits_resnet, of
random weights, exported to ONNX. Clients send one image in each request, as
JSON or as a PNG in base64, over connections that stay open. Directly called, the model gets the
same images one by one, and in batches of 64. All take turns. The clients share the machine's cores
with the server.

Texts are those of python_gpt with a larger context, after two steps of training. In each turn 32
clients ask at once for 20 to 1,000 tokens, drawn evenly by their logarithm from a seed, and while
these are written, a client asks for 20 tokens again and again. The first turn compiles.

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
    parser.add_argument("--texts", action="store_true")
    parser.add_argument("--context", type=int, default=1024)
    given = parser.parse_args()
    if given.texts:
        _measure_texts(given.context, given.turns)
        return
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


def _measure_texts(context: int, turns: int) -> None:
    """Prints how long texts wait, and the tokens a second of all of them."""
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(20), np.log(1000), 32)).astype(int)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"--config.{part}.context={context}" for part in ("model", "data")]
        overrides += ["--config.data.global_batch_size=2", "--config.train.steps=2"]
        train = [sys.executable, "-c", _MAIN, "train", "python_gpt", f"--workdir={folder}/run"]
        subprocess.run([*train, *overrides], check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-c", _MAIN, "serve", f"{folder}/run", "--port=0"]
        command.append("--timeout=20m")  # which the first turn may need, to compile
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
            for turn in range(turns + 1):
                _write_together(
                    port, lengths.tolist(), "compiling" if turn == 0 else f"turn {turn}"
                )
            server.terminate()


def _write_together(port: int, lengths: list[int], name: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(len(lengths)) as pool:
        start = time.perf_counter()
        asked = [pool.submit(_stream_text, port, n, seed) for seed, n in enumerate(lengths)]
        time.sleep(0.5)
        first_tokens = []
        while not all(future.done() for future in asked):
            first_tokens.append(_stream_text(port, 20, 0)[0])
            time.sleep(0.1)
        found = [future.result() for future in asked]
        seconds = time.perf_counter() - start
    waited = statistics.median(first for first, _ in found)
    print(
        f"{name:10} {sum(lengths) / seconds:6.0f} tokens/s of {sum(lengths)} in {seconds:5.1f} s; "
        f"first token after {waited:5.2f} s (median); of {len(first_tokens)} short texts "
        f"meanwhile after {statistics.median(first_tokens):5.2f} s, "
        f"at most {max(first_tokens):5.2f} s",
        flush=True,
    )


def _stream_text(port: int, tokens: int, seed: int) -> tuple[float, float]:
    """Returns the seconds until the first token of a text, and until its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"prompt": "def ", "max_tokens": tokens, "seed": seed, "stream": True}
    start = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.readline()
    first = time.perf_counter() - start
    rest = answer.read()
    assert b"[DONE]" in rest, rest[-200:]
    return first, time.perf_counter() - start


def _print(name: str, spent: list[float], throughput: float) -> None:
    p50, p99 = statistics.median(spent), float(np.percentile(spent, 99))
    print(f"{name:28} p50 {1e3 * p50:8.2f} ms  p99 {1e3 * p99:8.2f} ms  {throughput:8.0f}/s")


if __name__ == "__main__":
    main()
