"""The server of models, over HTTP on loopback."""

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.support import serving
from tests.support.serving import (
    CLASSES,
    SHAPE,
    ask,
    head_of_post,
    pixels,
    running,
    wait_for_waiting,
)
from tftpu.errors import UserError
from tftpu.inference.batch import Part
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.rows import Row
from tftpu.inference.sampling import Sampling
from tftpu.inference.server import run
from tftpu.inference.server.served import Refused, Served
from tftpu.inference.server.text import Stopped, Texts


@pytest.fixture(scope="module")
def model() -> Served:
    return serving.images()


@pytest.fixture(scope="module")
def port(model):
    with running(model) as found:
        yield found


def test_rows_and_columns_are_what_the_model_returns(model, port):
    given = pixels(3)
    expected = model.call({"images": given})
    status, rows = ask(port, "POST", "/predict", {"instances": given.tolist()})
    assert status == 200
    found = [row["logits"] for row in rows["predictions"]]
    np.testing.assert_allclose(found, expected["logits"], rtol=1e-6)
    assert [row["label"] for row in rows["predictions"]] == [
        CLASSES[n] for n in expected["logits"].argmax(-1)
    ]
    named = [{"images": image} for image in given.tolist()]
    for path in "/v1/models/m:predict", "/v1/models/m/versions/1:predict":
        body = {"signature_name": "serving_default", "instances": named}
        assert ask(port, "POST", path, body) == (200, rows)
    for inputs in given.tolist(), {"images": given.tolist()}:
        status, columns = ask(port, "POST", "/v1/models/m:predict", {"inputs": inputs})
        assert status == 200 and columns["outputs"]["logits"] == found


def test_an_image_file_is_its_pixels(port):
    image = pixels(1)[0]
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    encoded = {"b64": base64.b64encode(file.getvalue()).decode()}
    plain = ask(port, "POST", "/predict", {"instances": [image.tolist()]})
    for row in encoded, {"images": encoded}:
        assert ask(port, "POST", "/predict", {"instances": [row]}) == plain


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_file_is_turned_upright_as_in_training(port, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = pixels(1)[0]
    stored = image.swapaxes(0, 1) if orientation > 4 else image  # so that it is SHAPE upright
    # By hand, from the EXIF standard: where the first row and column of what is stored are seen.
    turned = {
        1: image, 2: image[:, ::-1], 3: image[::-1, ::-1], 4: image[::-1], 5: image,
        6: image[:, ::-1], 7: image[::-1, ::-1], 8: image[::-1],
    }[orientation]  # fmt: skip
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(stored)).save(file, "PNG", exif=exif)
    encoded = {"b64": base64.b64encode(file.getvalue()).decode()}
    expected = ask(port, "POST", "/predict", {"instances": [turned.tolist()]})
    assert ask(port, "POST", "/predict", {"instances": [encoded]}) == expected


def test_it_says_what_it_serves(port):
    assert ask(port, "GET", "/health") == (200, {})
    _, status = ask(port, "GET", "/v1/models/m")
    assert status["model_version_status"][0]["state"] == "AVAILABLE"
    _, metadata = ask(port, "GET", "/v1/models/m/metadata")
    assert metadata["metadata"]["inputs"] == {"images": {"dtype": "uint8", "shape": [-1, *SHAPE]}}
    assert set(metadata["metadata"]["outputs"]) == {"logits", "class", "label"}
    status, metrics = ask(port, "GET", "/metrics")
    assert status == 200 and b'tftpu_requests_total{route="predict",status="200"}' in metrics


def encode(texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns an image for each text, whose pixels are the number of its letters."""
    if "?" in texts:
        raise Refused("a question")
    return {"images": np.stack([np.full(SHAPE, len(text), np.uint8) for text in texts])}


def test_texts_are_answered_as_what_they_are_encoded_to(model):
    texts = ["ab", "abcde"]
    with running(dataclasses.replace(model, encode=encode), batch=2) as port:
        asked = {"instances": encode(texts)["images"].tolist()}
        expected = ask(port, "POST", "/predict", asked)
        assert expected[0] == 200 and len(expected[1]["predictions"]) == 2
        for instances in texts, [{"sentence": text} for text in texts]:
            for path in "/predict", "/v1/models/m:predict":
                assert ask(port, "POST", path, {"instances": instances}) == expected
        columns = ask(port, "POST", "/predict", {"inputs": asked["instances"]})
        for inputs in texts, {"sentence": texts}:
            assert ask(port, "POST", "/predict", {"inputs": inputs}) == columns
        for instances, says in {
            ("ab", 3): "Some examples are texts and some are not",
            ("a", ""): "The text of instance 1 is empty: send one with words.",
            ("a",) * 3: "There are 3 texts: give 1 to 2, which the server's --batch_size=N raises.",
            ("a", "?"): "Instance 1: a question",
            ("a", "b" * 20_001): "instance 1 has 20,001 characters, and may have 20,000: send a",
        }.items():
            status, said = ask(port, "POST", "/predict", {"instances": instances})
            assert status == 400 and says in said["error"]
        _, said = ask(port, "POST", "/predict", {"instances": [{"text": "ab"}]})
        assert said["error"].endswith("the model takes 'images', or 'sentence', a text.")
        for body, says in (
            ({"instances": [{"sentence": 3}]}, "'sentence' must be a text, not the number 3."),
            ({"instances": [{"sentence": ["ab"]}]}, "'sentence' must be a text, not a list."),
            ({"inputs": {"sentence": "ab"}}, "'sentence' must be a list of texts."),
        ):
            assert ask(port, "POST", "/predict", body) == (400, {"error": says})


def test_texts_that_wait_are_limited_and_those_that_nobody_wants_are_not_encoded():
    gate, begun = threading.Semaphore(0), []

    def encode(texts: Sequence[str]) -> dict[str, np.ndarray]:
        begun.extend(texts)
        assert gate.acquire(timeout=30)
        return {"x": np.array([len(text) for text in texts], np.int32)}

    opened = threading.Event()
    opened.set()
    model = dataclasses.replace(held(opened, []), encode=encode)
    with (
        running(model, batch=2, waiting=2) as port,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        body = json.dumps({"instances": ["gone", "never"]}).encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head_of_post(len(body)) + body)
            while not begun:
                time.sleep(0.01)
            waits = pool.submit(ask, port, "POST", "/predict", {"instances": ["a", "bcd"]})
            wait_for_waiting(port, 2)
            assert ask(port, "POST", "/predict", {"instances": ["ab"]})[0] == 429
        while b'status="499"' not in ask(port, "GET", "/metrics")[1]:
            time.sleep(0.01)
        gate.release(10)
        assert waits.result() == (200, {"predictions": [2, 6]})
        assert ask(port, "POST", "/predict", {"instances": ["ab"]}) == (200, {"predictions": [4]})
    assert begun == ["gone", "a", "bcd", "ab"]


def with_a_float() -> list:
    """Returns an image of whole numbers but for its last one."""
    [image] = pixels(1).tolist()
    image[-1][-1][-1] = 0.5
    return image


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{'instances': [1]}", "JSON has double quotes"),
        (b"[1]", "JSON object"),
        ({}, "either instances"),
        ({"instances": []}, "at least one"),
        ({"instance": [1]}, "no field 'instance' beside instances, inputs, signature_name, "),
        ({"instance": [1]}, "Did you mean 'instances'?"),
        (
            {"images": [1]},
            "'images' is an input of the model, which belongs in inputs. Send "
            '{"instances": [...]} or {"inputs": {"images": [...]}}.',
        ),
        ({"x": [1]}, 'parameters. Send {"instances": [...]} or {"inputs": {"images": [...]}}.'),
        ({"instances": [[1, 2]]}, "takes uint8 [6, 4, 3] for each example; given was [2]"),
        ({"instances": [[1], [1, 2]]}, "differ in shape"),
        (
            {"instances": [*pixels(1).tolist(), [[1, 2]]]},
            "[6, 4, 3] for each example; instance 1 is [1, 2]",
        ),
        ({"instances": [{"image": 1}]}, "has 'image'; the model takes 'images'"),
        ({"instances": np.full((1, *SHAPE), 256).tolist()}, "from 0 to 255"),
        (
            {"instances": np.full((1, *SHAPE), 0.0).tolist()},
            "numbers are floats, such as 0.0: send whole numbers 0 to 255, in Python "
            "array.astype('uint8').tolist() (first scaled to this range: times 255 if white is 1, "
            "times 255 / 16 if it is 16).",
        ),
        ({"instances": [*pixels(1).tolist(), with_a_float()]}, "floats, such as 0.5: send whole"),
        (
            {"instances": ["a"]},
            "for each example; given was a text, 'a'. Send an image file as {\"b64\": ",
        ),
        ({"instances": [None]}, "for each example; given was null."),
        ({"instances": [True]}, "for each example; given was true."),
        ({"instances": np.full((1, *SHAPE), False).tolist()}, "something else, such as false."),
        ({"instances": np.full((1, *SHAPE), None).tolist()}, "something else, such as null."),
        ({"instances": [3]}, "for each example; given was the number 3."),
        ({"instances": np.zeros(SHAPE, int).tolist()}, "A list is missing around this one"),
        ({"instances": np.full((1, *SHAPE), "a").tolist()}, "something else, such as 'a'"),
        ({"instances": np.full((1, *SHAPE), "1").tolist()}, '"1" is a text: write it without'),
        ({"instances": [{"b64": "!"}]}, "base64"),
        ({"instances": [{"b64": "AAAA"}]}, "b64 holds no image"),
        ({"instances": [*pixels(1).tolist(), {"b64": "AAAA"}]}, "Instance 1: b64 holds no image"),
        ({"instances": pixels(1).tolist(), "parameters": {"a": 1}}, "no parameters"),
        ({"inputs": {"a": [1]}}, "has 'a'; the model takes 'images'"),
        ({"inputs": {"b64": "a"}}, "must be a list of examples"),
        ({"instances": [2, {"images": 1}]}, "Instance 1 has 'images', and instance 0 has no names"),
        ({"instances": pixels(1).tolist(), "signature_name": "x"}, "serving_default"),
    ],
)
def test_a_mistake_is_explained(port, body, says):
    status, answer = ask(port, "POST", "/predict", body)
    assert status == 400 and says in answer["error"]


def test_other_addresses_and_methods_are_refused(port):
    status, answer = ask(port, "GET", "/v1/models/other")
    assert status == 404 and "Did you mean '/v1/models/m'?" in answer["error"]
    status, answer = ask(port, "GET", "/v1/models")  # OpenAI's list is no misspelling
    assert status == 404 and "There are /" in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    status, answer = ask(port, "POST", "/v1/completions", {"prompt": "a"})
    assert status == 404 and "serve the run of a language model" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed", "says"),
    [
        ("GET", "/predict", "POST", 'Use POST with a body of JSON, {"instances": [...]}, as in'),
        ("PUT", "/v1/models/m:predict", "POST", "This address does not answer PUT. Use POST"),
        ("POST", "/health", "GET", "Use GET: curl http://127.0.0.1:"),
    ],
)
def test_a_wrong_method_gets_json_and_the_right_method(port, method, path, allowed, says):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    assert answer.status == 405 and answer.getheader("content-type") == "application/json"
    assert allowed in (answer.getheader("allow") or "")
    assert says in json.loads(answer.read())["error"]
    connection.close()


def test_unknown_addresses_are_counted_together(model):
    with running(model) as port:
        for path in "/a", "/b", "/v1/models":
            assert ask(port, "GET", path)[0] == 404
        assert ask(port, "GET", "/predict")[0] == 405
        lines = ask(port, "GET", "/metrics")[1].decode().splitlines()
    counted = [line for line in lines if line.startswith("tftpu_requests_total")]
    assert sorted(counted) == [
        'tftpu_requests_total{route="other",status="404"} 3.0',
        'tftpu_requests_total{route="other",status="405"} 1.0',
    ]


def held(gate: threading.Event, seen: list[int]) -> Served:
    """Returns a model that waits for a gate, and doubles; 13 is nothing that it takes."""

    def call(given: Any) -> Any:
        seen.append(len(given["x"]))
        assert gate.wait(30)
        if 13 in given["x"]:
            raise Refused("13 brings bad luck")
        return {"y": given["x"] * 2}

    return Served((Input("x", (), "int32"),), ("y",), call)


def test_what_waits_is_the_next_batch_and_a_bad_example_is_its_own():
    gate, seen = threading.Event(), []
    with (
        running(held(gate, seen), batch=8) as port,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):

        def post(*values: int) -> concurrent.futures.Future:
            return pool.submit(ask, port, "POST", "/predict", {"instances": list(values)})

        first = post(1)
        while not seen:
            time.sleep(0.01)
        others = [post(2, 3), post(13), post(4)]
        wait_for_waiting(port, 4)
        gate.set()
        assert first.result() == (200, {"predictions": [2]})
        assert others[0].result() == (200, {"predictions": [4, 6]})
        assert others[1].result() == (400, {"error": "13 brings bad luck"})
        assert others[2].result() == (200, {"predictions": [8]})
        assert seen[:2] == [1, 4]
        del seen[:]
        assert post(*range(20, 40)).result()[1]["predictions"] == list(range(40, 80, 2))
        assert seen == [8, 8, 4]


@pytest.mark.medium
def test_limits_of_size_of_time_and_of_what_waits():
    gate, seen = threading.Event(), []
    limits = {"body": 1000, "seconds": 3.0, "waiting": 3, "batch": 2}
    with running(held(gate, seen), **limits) as port:
        assert ask(port, "POST", "/predict", b" " * 1001)[0] == 413
        with concurrent.futures.ThreadPoolExecutor() as pool:
            asked = []
            for value in range(1, 7):
                body = {"instances": [value]}
                asked.append(pool.submit(ask, port, "POST", "/predict", body))
                while not seen:
                    time.sleep(0.01)
                wait_for_waiting(port, min(value - 1, 3))
            statuses = [future.result()[0] for future in asked]
        assert statuses == [504, 504, 504, 504, 429, 429]
        gate.set()
        assert ask(port, "POST", "/predict", {"instances": [5]}) == (200, {"predictions": [10]})
        assert seen == [1, 1]  # nothing was computed for those that had given up


@pytest.mark.medium
def test_bodies_that_come_slowly_or_are_too_many():
    gate, seen = threading.Event(), []
    head = head_of_post(900)
    with running(held(gate, seen), body=1000, seconds=2.0) as port, contextlib.ExitStack() as stack:
        slow = []
        for _ in range(18):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            one.sendall(head + b" " * 899)
            slow.append(one)
        answers = [one.recv(1000) for one in slow]
        statuses = sorted(int(answer.split()[1]) for answer in answers)
        assert statuses == [408] * 17 + [429]
        gate.set()  # nothing is held any longer
        assert ask(port, "POST", "/predict", {"instances": [5] * 200})[0] == 200


def test_sixteen_bits_and_colours_are_what_tensorflow_decodes(port):
    grey = np.arange(24, dtype=np.uint16).reshape(SHAPE[:2]) * 2570
    image = pixels(1)[0]
    deep, plain = Image.fromarray(grey), Image.fromarray(image)
    for given in deep, plain, plain.convert("RGBA"), plain.convert("L"):
        file = io.BytesIO()
        given.save(file, "PNG")
        decoded = tf.io.decode_image(file.getvalue(), channels=3).numpy()
        encoded = {"b64": base64.b64encode(file.getvalue()).decode()}
        expected = ask(port, "POST", "/predict", {"instances": [decoded.tolist()]})
        assert ask(port, "POST", "/predict", {"instances": [encoded]}) == expected


def test_an_image_with_colours_is_nothing_for_a_model_of_grey():
    def encoded(mode: str) -> dict[str, str]:
        file = io.BytesIO()
        Image.fromarray(pixels(1)[0]).convert(mode).save(file, "PNG")
        return {"b64": base64.b64encode(file.getvalue()).decode()}

    grey = Served(
        (Input("x", (*SHAPE[:2], 1), "uint8"),),
        ("y",),
        lambda given: {"y": given["x"].sum((1, 2, 3))},
    )
    with running(grey) as port:
        assert ask(port, "POST", "/predict", {"instances": [encoded("L")]})[0] == 200
        status, answer = ask(port, "POST", "/predict", {"instances": [encoded("RGB")]})
        assert status == 400 and "has colours" in answer["error"]


@pytest.mark.parametrize("shape", [(3,), ()])
def test_an_output_without_a_batch_is_refused(shape):
    def call(given: Any) -> Any:
        return {"y": given["x"] * 2, "table": np.ones(shape)}

    model = Served((Input("x", (), "int32"),), ("y", "table"), call)
    with pytest.raises(UserError, match=r"'table' has the shape"):
        run.warm(model)
    with running(model) as port:  # and if it is found later, nothing wrong is answered
        assert ask(port, "POST", "/predict", {"instances": [1, 2, 3, 4]})[0] == 500
        assert ask(port, "GET", "/health")[0] == 200


def test_texts_of_any_rank_are_outputs():
    def call(given: Any) -> Any:
        return {"y": np.array([[b"a", b"b"]] * len(given["x"]), object)}

    with running(Served((Input("x", (), "int32"),), ("y",), call)) as port:
        _, answer = ask(port, "POST", "/predict", {"instances": [1, 2]})
        assert answer["predictions"] == [["a", "b"]] * 2


def test_a_client_that_leaves_is_no_longer_computed_for():
    gate, seen = threading.Event(), []
    with running(held(gate, seen)) as port:
        first = threading.Thread(target=ask, args=(port, "POST", "/predict", {"instances": [1]}))
        first.start()
        while not seen:
            time.sleep(0.01)
        body = json.dumps({"instances": [7] * 50}).encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = head_of_post(len(body))
            connection.sendall(head + body)
            wait_for_waiting(port, 50)
        wait_for_waiting(port, 0)
        gate.set()
        first.join()
        assert ask(port, "POST", "/predict", {"instances": [5]}) == (200, {"predictions": [10]})
        assert seen == [1, 1]


def test_a_model_that_fails_is_no_end():
    def call(given: Any) -> Any:
        raise ZeroDivisionError

    with running(Served((Input("x", (), "int32"),), ("y",), call)) as port:
        for _ in range(2):
            status, answer = ask(port, "POST", "/predict", {"instances": [1]})
            assert status == 500 and "ZeroDivisionError" in answer["error"]
        assert ask(port, "GET", "/health")[0] == 200


def test_two_that_had_the_same_port_are_told_apart():
    first = run.bind_socket("127.0.0.1", 0)
    second = run.bind_socket("127.0.0.1", first.getsockname()[1])
    with first, second:
        run.listen(first)
        with pytest.raises(UserError, match=r"already in use"):
            run.listen(second)


def test_a_server_that_ends_says_so_in_the_middle_of_a_text():
    gate = threading.Event()

    class Slow(list):
        vocabulary, context = 3, 8

        @property
        def writer(self) -> Any:
            return self

        def open_batch(self, tokens: int, before_compiling: Any) -> Any:
            return self

        def add(self, key: Any, row: Row) -> None:
            self.append(key)

        def advance(self) -> Any:
            yield [Part(self[0], [1], False)]
            assert gate.wait(30)
            yield [Part(self.pop(), [2], True)]

    async def read_until_the_end() -> tuple[list[int], str]:
        texts = Texts(cast(Any, Slow()), 8, 8, lambda size: None)
        working = asyncio.create_task(texts.run())
        [parts] = texts.submit([Row([0], 5, Sampling())])
        found = await anext(parts)
        texts.stop()
        with pytest.raises(Stopped) as stopped:
            await anext(parts)
        gate.set()
        working.cancel()
        return found, str(stopped.value)

    assert asyncio.run(read_until_the_end()) == ([1], "the server stops")


@pytest.mark.slow
def test_texts_are_those_of_the_writer_together_and_alone():
    model = serving.letters()
    prompts = ["abc", "hello world", "q"]
    rules = [{"temperature": 0.7}, {"top_k": 5, "seed": 3}, {"temperature": 0}]

    def expected(prompt: str, seed: int = 0, **rule: Any) -> str:
        row = Row(model.encode(prompt), 20, Sampling(**rule, tokens=128), seed)
        return model.decoder([])([t for [part] in model.writer.write([row]) for t in part])

    def body(prompt: str, rule: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": 20, "seed": 0, **rule, **fields}

    with running(model) as port, concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = [
            (prompt, rule, pool.submit(ask, port, "POST", "/v1/completions", body(prompt, rule)))
            for prompt in prompts
            for rule in rules
        ]
        for prompt, rule, future in asked:
            status, answer = future.result()
            assert status == 200
            assert answer["choices"][0]["text"] == expected(prompt, **rule)
        given = {"instances": prompts, "parameters": {"temperature": 0, "max_tokens": 20}}
        _, answer = ask(port, "POST", "/predict", given)
        texts = [row["text"] for row in answer["predictions"]]
        assert texts == [expected(prompt, temperature=0) for prompt in prompts]
        streamed = body("abc", {"temperature": 0}, stream=True)
        for wrong in {"prompt": "a", "max_tokens": 3}, {"text": "a"}, 5:
            status, answer = ask(port, "POST", "/predict", {"instances": [wrong]})
            assert status == 400 and "parameters" in answer["error"]
        status, events = ask(port, "POST", "/v1/completions", streamed)
        lines = events.decode().strip().split("\n\n")
        parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
        assert lines[-1] == "data: [DONE]" and len(parts) >= 3  # as calls of the device end
        assert "".join(part["text"] for part in parts) == texts[0]
        assert parts[-1]["finish_reason"] == ("length" if len(texts[0]) == 20 else "stop")
