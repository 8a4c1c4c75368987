"""The line for the shell that the server prints, run by a shell."""

import dataclasses
import json
import shlex
import subprocess

import numpy as np
import pytest

from tests.support.serving import running
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server.example import build_curl
from tftpu.inference.server.served import Served
from tftpu.inference.server.text import Language


def served(*inputs: Input) -> Served:
    return Served(inputs, ("y",), lambda given: {"y": given["a"].reshape(len(given["a"]), -1)})


@pytest.mark.parametrize(
    "model",
    [
        served(Input("a", (4,), "float32")),
        served(Input("a", (), "int32"), Input("b", (2, 1), "bool")),
        served(Input("a", (8, 8, 3), "uint8"), Input("b", (), "bool")),
        served(Input("a", (12, 12, 1), "float32")),
    ],
    ids=["vector", "several", "large and several", "large"],
)
def test_the_line_asks_for_a_prediction(model):
    with running(model) as port:
        line = build_curl(model, f"http://127.0.0.1:{port}", "/predict")
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
        assert done.stdout.startswith('{"predictions":[[0')
        whole = line.removesuffix(" | (head -c 300; cat >/dev/null)")
        done = subprocess.run(["sh", "-c", whole], capture_output=True, text=True, check=True)
    [row] = json.loads(done.stdout)["predictions"]
    assert row == np.zeros(np.shape(row)).tolist() and len(line) < 400


def test_the_line_gives_a_text_where_the_model_takes_texts():
    model = dataclasses.replace(served(Input("a", (64,), "int32")), encode=lambda texts: {})
    *_, body = shlex.split(build_curl(model, "http://127.0.0.1:80", "/predict"))
    assert json.loads(body) == {"instances": [{"sentence": "so good"}]}


@pytest.mark.parametrize("route", ["/v1/completions", "/predict"])
def test_the_line_asks_for_any_text(route):
    language = Language(None, list, lambda prompt: str, 8, 8)  # pyright: ignore[reportArgumentType]
    line = build_curl(language, "http://127.0.0.1:80", route, 'It\'s "the" bäcker $HOME')
    *_, body = shlex.split(line)
    asked = json.loads(body)
    assert asked.get("prompt", asked.get("instances")) in (
        'It\'s "the" bäcker $HOME',
        [{"prompt": 'It\'s "the" bäcker $HOME'}],
    )
