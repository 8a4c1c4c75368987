"""`tftpu serve` as its own process."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import keras
import numpy as np
import onnxruntime
import pytest

from tests.support import warm
from tests.support.serving import JSON, SHAPE, ask, pixels
from tftpu.errors import UserError
from tftpu.inference.exporting import export
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.exporting.serving import Serving
from tftpu.inference.server import device, served
from tftpu.launch.main import main

PROGRAM = "from tftpu.launch.main import run; run()"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, str]:
    """A model in each format, by its name."""
    folder = tmp_path_factory.mktemp("models")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input(SHAPE), *layers])
    inputs = [Input("images", SHAPE, "uint8")]
    serving = Serving(model, inputs, lambda x: keras.ops.cast(x, "float32"), ["a", "b", "c"])
    export.onnx(serving, str(folder / "m.onnx"), {})
    export.saved_model(serving, str(folder / "saved"))
    return {"onnx": str(folder / "m.onnx"), "saved_model": str(folder / "saved")}


@contextlib.contextmanager
def serving(
    *flags: str, route: str = "", **environment: str
) -> Iterator[tuple[subprocess.Popen, int]]:
    """Runs `tftpu serve`; yields the process and its port, once it answers.

    Args:
        flags: the flags of the command.
        route: the end of the address that it prints.
        environment: variables of its environment.
    """
    command = [sys.executable, "-c", PROGRAM, "serve", *flags]
    process = warm.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        assert line.endswith(f"{route}\n")
        yield process, int(line.split("127.0.0.1:")[1].split("/")[0])
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_vertex_ais_contract_and_an_end_that_answers_first(exported):
    given = pixels(4)
    session = onnxruntime.InferenceSession(exported["onnx"])
    expected, labels = session.run(["logits", "label"], {"images": given})
    variables = {
        "AIP_HTTP_PORT": "0",
        "AIP_HEALTH_ROUTE": "/v1/endpoints/1/health",
        "AIP_PREDICT_ROUTE": "/v1/endpoints/1:predict",
        "AIP_STORAGE_URI": os.path.dirname(exported["onnx"]),  # the folder, as Vertex AI has it
    }
    with serving("--host=127.0.0.1", **variables) as (process, port):
        assert ask(port, "GET", "/v1/endpoints/1/health") == (200, {})
        body, called = {"instances": given.tolist()}, {**JSON, "Host": "any.name.of.vertex.ai"}
        status, answer = ask(port, "POST", "/v1/endpoints/1:predict", body, called)
        assert status == 200
        rows = answer["predictions"]
        np.testing.assert_allclose([row["logits"] for row in rows], expected, rtol=1e-6)
        assert [row["label"] for row in rows] == labels.tolist()
        many, found = {"instances": pixels(3000).tolist()}, []

        def large() -> None:
            found.append(ask(port, "POST", "/v1/endpoints/1:predict", many))

        thread = threading.Thread(target=large)
        thread.start()
        while not found and b"tftpu_waiting 0.0" in ask(port, "GET", "/metrics")[1]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        thread.join(30)
        assert process.wait(30) == 0
        [(status, answer)] = found
        assert status == 200 and len(answer["predictions"]) == 3000


@pytest.mark.slow
def test_a_signal_at_the_first_line_ends_it_well(exported):
    with serving(f"--model={exported['onnx']}", "--port=0") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_saved_model_is_served(exported):
    given = pixels(2)
    session = onnxruntime.InferenceSession(exported["onnx"])
    [expected] = session.run(["logits"], {"images": given})
    flags = exported["saved_model"], "--port=0", "--allow_hosts=a.example,b.example"
    with serving(*flags) as (process, port):
        path = "/v1/models/saved:predict"
        assert ask(port, "GET", path[:-8], headers={"Host": "c.example"})[0] == 403
        called = {**JSON, "Host": "b.example"}
        status, answer = ask(port, "POST", path, {"inputs": given.tolist()}, called)
        assert status == 200
        np.testing.assert_allclose(answer["outputs"]["logits"], expected, rtol=1e-5)
        assert process.poll() is None
        for _ in range(2):  # as `timeout -s INT` does, to a process and then to its group
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert process.wait(30) == 0
        assert process.stdout is not None and process.stderr is not None
        took, ask_it, *others = process.stdout.read().splitlines()
        assert re.fullmatch(r"Ready after [\d.]+ s, [\d.]+ of them to compile. Ask it:", took)
        assert f"curl http://127.0.0.1:{port}/predict " in ask_it
        assert others == ["Ctrl-C ends it.", "Stopped."]
        doing = [line for line in process.stderr.read().splitlines() if line.endswith(" ...")]
        assert [line.split()[0] for line in doing] == ["Loading", "Compiling"]


@pytest.mark.slow
def test_runs_are_served_one_with_arrays_and_one_with_text(tmp_path, capsys):
    steps = ("epochs=None", "steps=2", "steps_per_loop=2", "eval_every=2", "log_every=2")
    options = [f"--config.train.{option}" for option in steps]
    options.append("--config.optimizer.warmup_steps=1")
    digits, texts = f"--workdir={tmp_path}/digits", f"--workdir={tmp_path}/texts"
    assert main(["train", "--config=digits_resnet", digits, *options]) == 0
    small = ["--config.model.layers=1", "--config.model.width=32", "--config.model.heads=2"]
    assert main(["train", "--config=python_gpt", texts, *options, *small]) == 0
    with serving(digits, "--port=0", route="/predict") as (_, port):
        image = np.zeros((1, 8, 8, 1), int).tolist()
        status, answer = ask(port, "POST", "/v1/models/digits:predict", {"instances": image})
        assert status == 200 and len(answer["predictions"][0]["logits"]) == 10
    capsys.readouterr()
    words = ["--prompt=def", "--tokens=12", "--temperature=0.5", "--seed=3"]
    assert main(["generate", texts, *words]) == 0
    written = capsys.readouterr().out.rstrip("\n")
    with serving(texts, "--port=0", route="/v1/completions") as (process, port):
        body = {"prompt": "def", "max_tokens": 12, "temperature": 0.5, "seed": 3}
        status, answer = ask(port, "POST", "/v1/completions", body)
        assert status == 200 and "def" + answer["choices"][0]["text"].rstrip("\n") == written
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        long = {"prompt": ["def"] * 64, "max_tokens": 200, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(long), JSON)
        answered = connection.getresponse()
        answered.readline()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert b"The text ends here: the server stops." in answered.read()
        assert process.stderr is not None
        assert process.wait(30) == 0 and "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "Give a run, `tftpu serve runs/mine`"),
        (["--model=m.onnx", "--workdir=w"], "or an export, --model=PATH, not both"),
        (["--model=m.onnx", "--port=0"], "There is no file or folder m.onnx"),
        (["--model=nothing", "--port=0"], "There is no file or folder nothing"),
        (["--workdir=nothing", "--port=0"], "There is no run in 'nothing'"),
        (["--model=m.onnx", "--stop=x"], "--stop works only with a run"),
        (["--model=m.onnx", "--tokens=1024"], "--tokens works only with a run"),
        (
            ["--model=m.onnx", "--config.model.width=8"],
            "--config.model.width=8 works only with a run",
        ),
        (["--model=there.onnx", "--port=70000"], "choose another --port"),
        (["--model=there.onnx", "--name=a/b"], "--name=a/b becomes part of addresses: use letters"),
        (["--model=many", "--port=0"], "many holds 2 files of ONNX"),
        (["--model=there", "--port=0"], "there is not an export that can be served"),
        (["--model=m.onnx", "--batch=0"], "--batch"),
    ],
)
def test_a_mistake_is_explained(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    for name in "there.onnx", "many/a.onnx", "many/b.onnx", "there/model.keras":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert main(["serve", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_route_without_a_slash_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "m.onnx").touch()
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "health")
    assert main(["serve", f"--model={tmp_path}/m.onnx", "--port=0"]) == 2
    assert "AIP_HEALTH_ROUTE=health is not a route" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["²", "٣", "-1", "http"])
def test_a_variable_that_is_no_port_is_refused(tmp_path, monkeypatch, capsys, port):
    (tmp_path / "m.onnx").touch()
    monkeypatch.setenv("AIP_HTTP_PORT", port)
    assert main(["serve", f"--model={tmp_path}/m.onnx"]) == 2
    assert f"AIP_HTTP_PORT={port} is not a port" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [True, False])
def test_a_gpu_that_stays_idle_is_said(exported, tmp_path, monkeypatch, capsys, gpu):
    monkeypatch.setattr(device, "_NVIDIA", str(tmp_path if gpu else tmp_path / "none"))
    for path in exported.values():
        assert served.load(path).device == "CPU"
        assert ("runs on the CPU beside a GPU" in capsys.readouterr().err) == gpu


def test_a_port_that_is_taken_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model=m.onnx", f"--port={port}"]) == 2
        assert "Address already in use" in capsys.readouterr().err
        assert main(["serve", "nothing", f"--port={port}"]) == 2
        assert "There is no run in 'nothing'" in capsys.readouterr().err


def test_a_file_that_is_no_model_is_refused(tmp_path, capsys):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no model")
    assert main(["serve", f"--model={path}", "--port=0"]) == 2
    assert "ONNX Runtime cannot load" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bit_that_flipped_in_an_onnx_file_is_found(exported, tmp_path):
    """ONNX Runtime itself computes other numbers with it."""
    with open(exported["onnx"], "rb") as file:
        data = bytearray(file.read())
    assert served.load(exported["onnx"]).outputs
    for place in range(1, len(data), len(data) // 7):
        data[place] ^= 4
        (tmp_path / "m.onnx").write_bytes(data)
        with pytest.raises(UserError, match="does not match its checksum"):
            served.load(str(tmp_path / "m.onnx"))
        data[place] ^= 4


@pytest.mark.medium
def test_a_damaged_saved_model_gives_one_error(exported, tmp_path):
    shutil.copytree(exported["saved_model"], tmp_path / "m")
    graph = (tmp_path / "m" / "saved_model.pb").read_bytes()
    (tmp_path / "m" / "saved_model.pb").write_bytes(graph.replace(b"Identity", b"Identyty"))
    with pytest.raises(UserError, match=r"TensorFlow cannot load .*Identyty"):
        served.load(str(tmp_path / "m"))
