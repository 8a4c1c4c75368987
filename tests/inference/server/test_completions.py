"""Texts that are written together, and what fails on the way."""

import concurrent.futures
import dataclasses
import json
import random
import threading
import time
import types
from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.support import serving
from tests.support.serving import ask, running, wait_for_waiting
from tftpu.errors import NotFiniteError, UserError
from tftpu.inference.batch import Part
from tftpu.inference.rows import Row
from tftpu.inference.sampling import Sampling
from tftpu.inference.server import completions, run
from tftpu.inference.server.answers import BadRequest
from tftpu.inference.server.text import Language

STREAM = {"prompt": "a", "max_tokens": 5, "stream": True}


class Written:
    """A writer of the letter "a", which calls a function before each letter but a text's first."""

    def __init__(self, between: Any):
        self._between = between
        self.programs: Any = None

    def check(self, prompts: Any, length: int) -> None:
        """Takes everything."""

    def open_batch(self, tokens: int, before_compiling: Any) -> "Letters":
        """Returns a batch."""
        return Letters(self._between)


class Letters:
    """A batch of texts of the letter "a"; one whose prompt is "!" fails at its first letter."""

    def __init__(self, between: Any):
        self._between, self._left, self._new = between, {}, []
        self._failing: list[Any] = []

    def __len__(self) -> int:
        return len(self._left)

    def add(self, key: Any, row: Any) -> None:
        """Adds a text."""
        self._left[key] = row.length
        self._new.append(key)
        self._failing += [key] if row.prompt == [*b"!"] else []

    def remove(self, key: Any) -> None:
        """Ends a text."""
        self._left.pop(key, None)

    def advance(self) -> Iterator[list[Part]]:
        """Yields one letter for each text."""
        keys = self._new or list(self._left)
        if not self._new:
            self._between()
        self._new = []
        for key in keys:
            self._left[key] -= 1
            if key in self._failing:
                self._left[key] = 0
        yield [
            Part(key, [], True, NotFiniteError())
            if key in self._failing
            else Part(key, [97], not self._left[key])
            for key in keys
        ]
        self._left = {key: left for key, left in self._left.items() if left}


def language(between: Any) -> Language:
    def decoder(prompt: Any) -> Any:
        return lambda tokens: bytes(tokens).decode()

    return Language(cast(Any, Written(between)), lambda t: list(t.encode()), decoder, 128, 64)


def failing(error: Exception) -> Language:
    def between() -> None:
        raise error

    return language(between)


def failures(port: int) -> int:
    _, metrics = ask(port, "GET", "/metrics")
    [line] = [s for s in metrics.decode().splitlines() if s.startswith("tftpu_failures_total ")]
    return int(float(line.split()[1]))


def last_error(events: bytes) -> str:
    event = json.loads(events.decode().strip().split("\n\n")[-1].removeprefix("data: "))
    return message_of(event, "server_error")


def message_of(answer: dict[str, Any], kind: str) -> str:
    """Returns the message of an error in OpenAI's form."""
    message = answer["error"]["message"]
    expected = {"message": message, "type": kind, "param": None, "code": None}
    assert answer == {"error": expected}
    return message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"promt": "a"}, "There is no field 'promt'. Did you mean 'prompt'?"),
        (
            {"zzz": 1},
            "There is no field 'zzz'. Allowed: max_tokens, model, prompt, seed, stop, stream, "
            "stream_options, temperature, top_k, top_p, user.",
        ),
        (
            {"max_tokens": "5"},
            'max_tokens must be a whole number from 1 to 100, but "5" is a text: write it '
            "without quotes.",
        ),
        ({"temperature": "warm"}, "temperature must be a number."),
        (
            {"max_tokens": 0},
            "max_tokens=0: give 1 to 100.",
        ),
        (
            {"prompt": []},
            "There are 0 prompts: give 1 to 4.",
        ),
        (
            {"max_tokens": 101},
            "max_tokens=101: give 1 to 100, which the server's --tokens=N raises.",
        ),
        (
            {"prompt": ["a"] * 5},
            "There are 5 prompts: give 1 to 4, which the server's --batch_size=N raises.",
        ),
        *(
            (
                {"stop": stop},
                "stop must be a text of 1 to 256 characters, or a list of up to 4 such texts.",
            )
            for stop in ("", 5, {"a": 1}, ["a", ""], list("abcde"), "a" * 257)
        ),
        ({"stream_options": {"include_usage": True}}, 'stream_options needs "stream": true.'),
        *(
            (
                {"stream_options": options, "stream": True},
                'stream_options takes only "include_usage", which is true or false.',
            )
            for options in ({"include_usage": 1}, {"include": True}, [])
        ),
        ({"n": 2}, "n=2: only 1 is supported."),
        ({"n": True}, "n=true: only 1 is supported."),
        ({"echo": True}, "echo=true: only false is supported."),
        ({"echo": 0}, "echo=0: only false is supported."),
        ({"logprobs": 0}, "logprobs=0: only null is supported."),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5: only 0 is supported."),
        ({"logit_bias": {"5": 1}}, 'logit_bias={"5":1}: only {} is supported.'),
        ({"suffix": "a" * 99}, f'suffix="{"a" * 79}: only null is supported.'),
        ({"user": 5}, "user must be a text."),
    ],
)
def test_a_field_that_is_wrong_is_explained(given, message):
    with pytest.raises(BadRequest) as error:
        completions.parse_completion({"prompt": "a", **given}, language(lambda: None), 100, 4)
    assert str(error.value) == message


def test_what_clients_of_openai_send_by_default_changes_nothing():
    numbers = {"n": 1, "best_of": 1, "frequency_penalty": 0.0, "presence_penalty": 0}
    given = {**numbers, "echo": False, "logit_bias": {}, "user": "someone"}
    nulls = "logprobs suffix seed stop stream stream_options temperature top_p max_tokens model"
    given |= dict.fromkeys(nulls.split())
    for sent in {}, given, dict.fromkeys(given):
        asked = {**sent, "prompt": "a"}
        found = completions.parse_completion(asked, language(lambda: None), 100, 4)
        [row] = found.rows
        assert found[1:] == (False, (), False)
        assert row._replace(seed=0) == Row([97], 16, Sampling(tokens=128), 0, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 5}, 'max_tokens is a parameter: write "parameters": {"max_tokens": ...}.'),
        ({"parameters": {"max_token": 5}}, "no parameter 'max_token'. Did you mean 'max_tokens'?"),
        ({"parameters": {"stop": 5}}, "no parameter 'stop'. Allowed: max_tokens, seed, temp"),
        ({"parameters": [5]}, "parameters must be an object, with some of max_tokens, "),
    ],
)
def test_a_mistake_in_vertex_ais_form_is_explained(given, message):
    with pytest.raises(BadRequest) as error:
        completions.parse_instances({"instances": ["a"], **given}, 4)
    assert message in str(error.value)


def test_a_short_text_is_answered_while_a_long_one_is_written():
    gate, waiting = threading.Event(), threading.Event()

    def between() -> None:
        waiting.set()
        assert gate.wait(30)

    def body(*lengths: int) -> list[dict[str, Any]]:
        return [{"prompt": "a", "max_tokens": n, "temperature": 0} for n in lengths]

    with running(language(between)) as port, concurrent.futures.ThreadPoolExecutor() as pool:

        def post(given: dict[str, Any]) -> concurrent.futures.Future:
            return pool.submit(ask, port, "POST", "/v1/completions", given)

        long = post(body(3)[0])
        assert waiting.wait(30)
        short = post(body(1)[0])
        wait_for_waiting(port, 1)
        gate.set()
        gate.clear()  # the long text has one more letter, or waits for its last
        try:
            status, answer = short.result(20)
            assert status == 200 and answer["choices"][0]["text"] == "a"
            assert not long.done()
        finally:
            gate.set()
        assert long.result()[1]["choices"][0]["text"] == "aaa"


def test_a_failure_in_the_middle_of_a_text_is_counted_and_its_words_stay_here(caplog):
    with running(failing(ValueError("/secret/path"))) as port:
        status, events = ask(port, "POST", "/v1/completions", STREAM)
        assert status == 200 and last_error(events) == "The model failed: ValueError."
        assert b"secret" not in events and failures(port) == 1
    assert "A request failed." in caplog.text and "/secret/path" in caplog.text


def test_a_fault_of_the_model_is_none_of_the_client(caplog):
    with running(failing(UserError("values that are not finite"))) as port:
        status, answer = ask(port, "POST", "/v1/completions", {**STREAM, "stream": False})
        assert status == 500
        assert message_of(answer, "server_error") == "The model failed: UserError."
        assert failures(port) == 1
    assert "not finite" in caplog.text


def test_a_text_with_values_that_are_not_finite_ends_alone(caplog):
    began, gate = threading.Event(), threading.Event()

    def between() -> None:
        began.set()
        assert gate.wait(30)

    with running(language(between)) as port, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {**STREAM, "stream": False}
        other = pool.submit(ask, port, "POST", "/v1/completions", body)
        assert began.wait(30)
        bad = pool.submit(ask, port, "POST", "/v1/completions", {**body, "prompt": "!"})
        wait_for_waiting(port, 1)
        gate.set()
        status, answer = bad.result()
        assert status == 500
        assert "not finite, so no token can be drawn" in message_of(answer, "server_error")
        status, answer = other.result()
        assert status == 200 and answer["choices"][0]["text"] == "aaaaa"
        assert failures(port) == 1
    assert "values that are not finite" in caplog.text


def test_a_prompt_that_is_longer_than_the_context_is_refused():
    with running(language(lambda: None)) as port:
        asked = {"prompt": ["a", "a" * 63], "max_tokens": 1}
        assert ask(port, "POST", "/v1/completions", asked)[0] == 200
        asked["prompt"].append("a" * 64)
        status, answer = ask(port, "POST", "/v1/completions", asked)
    said = message_of(answer, "invalid_request_error")
    assert status == 400 and "has 64 tokens, but the model's context is 64" in said


@pytest.mark.parametrize("path", ["/predict", "/v1/completions"])
def test_a_prompt_of_millions_of_characters_is_refused_before_it_is_encoded(path):
    def encode(text: str) -> list[int]:
        assert len(text) <= 128 * 64
        return [1] * 64

    model = dataclasses.replace(language(lambda: None), encode=encode)
    for length, said in {128 * 64: "has 64 tokens", 3_000_000: "has 3,000,000 characters"}.items():
        text = "a" * length
        asked = {"instances": [text]} if path == "/predict" else {"prompt": ["b", text]}
        with running(model) as port:
            status, answer = ask(port, "POST", path, asked)
        assert status == 400 and said in str(answer)


@pytest.mark.medium
def test_a_text_that_takes_too_long_says_so():
    gate = threading.Event()
    with running(language(lambda: gate.wait(30)), seconds=0.5, waiting=1) as port:
        _, events = ask(port, "POST", "/v1/completions", STREAM)
        assert "the next part took longer than 0.5 s" in last_error(events)
        whole = {**STREAM, "stream": False}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            asked = [pool.submit(ask, port, "POST", "/v1/completions", whole) for _ in range(3)]
            answers = sorted((future.result() for future in asked), key=lambda found: found[0])
        assert [status for status, _ in answers] == [429, 429, 504]
        assert "try again later" in message_of(answers[0][1], "rate_limit_error")
        assert "longer than 0.5 s" in message_of(answers[2][1], "server_error")
        assert failures(port) == 0
        gate.set()


@pytest.mark.slow
def test_a_text_that_waits_for_a_program_says_so(caplog, monkeypatch):
    model, gate = serving.letters(), threading.Event()
    run.warm(model)
    assert not caplog.text
    programs = model.writer.programs
    write = programs.write

    def write_slowly(size: Any, *given: Any) -> Any:
        assert size.rows == 1 or gate.wait(30)
        return write(size, *given)

    monkeypatch.setattr(programs, "write", write_slowly)
    asked = {"prompt": ["a", "b", "c"], "max_tokens": 5}
    with running(model, seconds=0.5) as port:
        status, answer = ask(port, "POST", "/v1/completions", asked)
        said = message_of(answer, "server_error")
        assert status == 504 and "It is compiling for this size of request" in said
        said = "is compiled for up to 4 texts at once, of up to 128 tokens with their prompts."
        assert caplog.text.count(said) == 1
        gate.set()
        while ask(port, "POST", "/v1/completions", asked)[0] == 504:
            pass
    caplog.clear()
    with running(model, seconds=60) as port:
        assert ask(port, "POST", "/v1/completions", {**asked, "max_tokens": 100})[0] == 200
        assert ask(port, "POST", "/v1/completions", STREAM)[0] == 200  # as `warm` compiled it
    assert not caplog.text


def test_no_program_is_begun_while_a_text_is_written():
    gate, waiting, first_compiling, compiling = (threading.Event() for _ in range(4))
    begun: list[int] = []

    def between() -> None:
        waiting.set()
        assert gate.wait(30)

    def compile_size(size: int) -> None:
        begun.append(size)
        first_compiling.set()
        assert compiling.wait(30)

    model = language(between)
    writer: Any = model.writer
    writer.programs = types.SimpleNamespace(
        list_usual_sizes=lambda most, tokens: [1, 2, 4],
        has_compiled=lambda size: size == 1,
        compile=compile_size,
    )
    ended = threading.Event()
    with (
        running(model, compiled=lambda *_: ended.set()) as port,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        assert first_compiling.wait(30)
        asked = pool.submit(ask, port, "POST", "/v1/completions", {**STREAM, "stream": False})
        assert waiting.wait(30)  # a text is written while the first program is compiled
        compiling.set()
        assert not ended.wait(0.5) and begun == [2]
        gate.set()
        assert asked.result()[0] == 200
        assert ended.wait(30) and begun == [2, 4]


def test_a_model_without_further_sizes_says_nothing_of_them():
    model = language(lambda: None)
    writer: Any = model.writer
    writer.programs = types.SimpleNamespace(
        list_usual_sizes=lambda most, tokens: [1], has_compiled=lambda size: True, compile=None
    )
    said: list[int] = []
    with running(model, compiled=lambda count, _: said.append(count)) as port:
        assert ask(port, "POST", "/v1/completions", {**STREAM, "stream": False})[0] == 200
    assert not said


@pytest.mark.slow
def test_requests_of_sizes_that_were_compiled_ahead_do_not_wait(caplog):
    model, ended = serving.letters(), threading.Event()
    run.warm(model)
    with running(model, compiled=lambda *_: ended.set(), batch=2) as port:
        assert ended.wait(120)
        for rule in {"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}, {"max_tokens": 100}:
            for prompt in "a", "a" * 90, ["a", "b"]:
                given = {"prompt": prompt, **rule}
                assert ask(port, "POST", "/v1/completions", given)[0] == 200
    assert not caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_ends_says_farewell_to_a_text(monkeypatch, stream):
    gate = threading.Event()
    monkeypatch.setattr(run, "GRACE_S", 5)
    monkeypatch.setattr(run, "FAREWELL_S", 4.5)
    asked = {**STREAM, "stream": stream}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = threading.Event()

        def between() -> None:
            waiting.set()
            gate.wait(30)

        with running(language(between)) as port:
            found = pool.submit(ask, port, "POST", "/v1/completions", asked)
            assert waiting.wait(30)
        gate.set()
        status, answer = found.result()
    if stream:
        assert status == 200 and last_error(answer) == "The text ends here: the server stops."
    else:
        assert status == 503 and message_of(answer, "server_error") == "the server stops"


@pytest.mark.parametrize(
    ("parts", "stops", "texts", "ended"),
    [
        (["one tw", "o three"], ("two",), ["one ", ""], True),
        (["one tw", "ice"], ("two",), ["one ", "twice"], False),
        (["a.", "b.c"], ("b.", "."), ["a"], True),
        (["xa", "ab"], ("aab",), ["x", ""], True),
        (["xaa", "ab"], ("aab",), ["x", "a"], True),
        (["end"], (), ["end"], False),
        (["end"], ("d?",), ["en", "d"], False),
        (["abc", "X"], ("abcX", "bc"), ["a"], True),
        (["abcX"], ("abcX", "bc"), ["a"], True),
        (["ab"], ("b", "ab"), [""], True),
    ],
)
def test_a_text_ends_before_the_first_stop_however_it_is_divided(parts, stops, texts, ended):
    ending, found, stopped = completions.Ending(stops), [], False
    for part in parts:
        text, stopped = ending.add(part)
        found.append(text)
        if stopped:
            break
    if not stopped and ending.finish():
        found.append(ending.finish())
    assert (found, stopped) == (texts, ended)


def test_stops_do_not_depend_on_the_parts():
    chance = random.Random(0)

    def draw(longest: int) -> str:
        return "".join(chance.choice("ab") for _ in range(chance.randint(1, longest)))

    for _ in range(2000):
        stops, text = tuple(draw(4) for _ in range(3)), draw(12)
        ends = [(n, n - len(s)) for n in range(13) for s in stops if text[:n].endswith(s)]
        expected = text[: min(n for n in ends)[1]] if ends else text
        for size in (1, 2, 5, 12):
            ending, found, ended = completions.Ending(stops), [], False
            for start in range(0, len(text), size):
                part, ended = ending.add(text[start : start + size])
                found.append(part)
                if ended:
                    break
            assert "".join(found) + ("" if ended else ending.finish()) == expected, (stops, text)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_ends_the_answer_and_the_text(stream):
    """One of two prompts has it; what the other writes is whole."""
    model = serving.letters()
    asked = {"prompt": ["ab", "b"], "max_tokens": 30, "seed": 1}
    with running(model) as port:
        whole = ask(port, "POST", "/v1/completions", asked)[1]["choices"]
        first, second = (choice["text"] for choice in whole)
        stop = first[2:6]
        assert stop not in second
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        status, answer = ask(port, "POST", "/v1/completions", {**asked, "stop": stop, **options})
        assert status == 200
    if stream:
        *lines, last = answer.decode().strip().split("\n\n")
        assert last == "data: [DONE]"
        turns = [json.loads(line.removeprefix("data: ")) for line in lines]
        last = turns.pop()
        assert last["choices"] == [] and all(turn["usage"] is None for turn in turns)
        usage, choices = last["usage"], [turn["choices"][0] for turn in turns]
        found = ["".join(c["text"] for c in choices if c["index"] == n) for n in (0, 1)]
        ends = [c["finish_reason"] for c in choices if c["finish_reason"]]
    else:
        usage, found = answer["usage"], [choice["text"] for choice in answer["choices"]]
        ends = [choice["finish_reason"] for choice in answer["choices"]]
    assert found == [first.split(stop)[0], second]
    assert ends == ["stop", "length"]
    assert usage["prompt_tokens"] == 3
    assert 30 < usage["completion_tokens"] < 60


def test_a_text_that_has_its_stop_is_not_written_on():
    gate, turns = threading.Event(), []

    def between() -> None:
        turns.append(1)
        assert len(turns) < 6 or gate.wait(30)

    with running(language(between)) as port:
        asked = {"prompt": "b", "max_tokens": 60, "stop": ["aaa"]}
        _, answer = ask(port, "POST", "/v1/completions", asked)
        gate.set()
        time.sleep(0.5)  # in which all 60 would be written
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 3
    assert len(turns) < 9


def test_openai_clients_list_the_model():
    with running(language(lambda: None)) as port:
        status, found = ask(port, "GET", "/v1/models")
        assert status == 200 and found["object"] == "list"
        [model] = found["data"]
        assert isinstance(model.pop("created"), int)
        assert model == {"id": "m", "object": "model", "owned_by": "tftpu"}
        status, answer = ask(port, "POST", "/v1/chat/completions", {})
        assert status == 404
        assert "There is no chat: send" in message_of(answer, "invalid_request_error")
        status, answer = ask(port, "POST", "/v1/models", {})
        assert status == 405 and "Use GET" in message_of(answer, "invalid_request_error")
