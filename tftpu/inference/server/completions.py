"""Requests for text and their answers, in the form of OpenAI's completions.

https://platform.openai.com/docs/api-reference/completions: `prompt`, `max_tokens`, `temperature`,
`top_p`, `seed`, `stop`, `stream`, `stream_options`; and `top_k`. OpenAI's other fields are accepted
only with the values that have no effect, because clients send them.
"""

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple

import orjson

from tftpu.errors import UserError, did_you_mean
from tftpu.inference.rows import Row
from tftpu.inference.sampling import Sampling
from tftpu.inference.server.answers import BadRequest, UnknownModel
from tftpu.inference.server.arrays import is_number
from tftpu.inference.server.payloads import check_signature
from tftpu.inference.server.text import Language

_TOKENS = 16  # OpenAI's default for `max_tokens`
_STOPS, _LONGEST_STOP = 4, 256  # OpenAI's limit of stop sequences; most characters of one
_LONGEST_TOKEN = 128  # characters; no token of usual vocabularies has more
_LARGEST = 2**63 - 1
_NUMBERS = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "seed": int}
# Fields that OpenAI's clients send, and the only value of each, besides null, that is accepted.
_UNCHANGING = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "suffix": None,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
}


class Completion(NamedTuple):
    """A parsed request for texts.

    Attributes:
        rows: a row for each prompt.
        stream: whether the parts of the text are sent as soon as they are written.
        stops: the stop sequences; a text ends before the first one.
        usage: whether the last event of a stream reports the numbers of tokens.
    """

    rows: list[Row]
    stream: bool
    stops: tuple[str, ...]
    usage: bool


def check_model(given: Mapping[str, Any], name: str) -> None:
    """Raises `UnknownModel` if a request names another model than the served one."""
    asked = given.get("model")
    if asked not in (None, name):
        raise UnknownModel(f"There is no model {str(asked)[:80]!r}: the only one is {name!r}.")


def parse_completion(
    given: Mapping[str, Any], language: Language, longest: int, most: int
) -> Completion:
    """Parses a request for text; returns its rows and options.

    Args:
        given: the JSON object in its body.
        language: the language model.
        longest: the most tokens to write for a prompt.
        most: the most prompts in a request.

    Raises:
        BadRequest: the request cannot be answered.
    """
    known = {*_NUMBERS, "prompt", "stop", "stream", "stream_options", "model", "user"}
    unknown = sorted(set(given) - known - set(_UNCHANGING))
    if unknown:
        name = unknown[0][:80]
        raise BadRequest(f"There is no field {name!r}.{did_you_mean(name, known)}")
    for name, only in _UNCHANGING.items():
        _check_unchanging(name, given.get(name), only)
    if not isinstance(given.get("user"), str | None):
        raise BadRequest("user must be a text.")
    stream = given.get("stream") or False
    if not isinstance(stream, bool):
        raise BadRequest("stream must be true or false.")
    prompts = given.get("prompt")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise BadRequest("prompt must be a text, or a list of texts.")
    if not 1 <= len(prompts) <= most:
        raise BadRequest(_explain_count(len(prompts), "prompts", most))
    stops = _parse_stops(given.get("stop"))
    usage = _parse_usage(given.get("stream_options"), stream)
    return Completion(build_rows(prompts, given, language, longest), stream, stops, usage)


def _check_unchanging(name: str, value: Any, only: Any) -> None:
    # In Python True equals 1 and False equals 0, but JSON distinguishes them.
    alike = value == only and isinstance(value, bool) == isinstance(only, bool)
    if value is not None and not alike:
        said, allowed = (orjson.dumps(v).decode() for v in (value, only))
        raise BadRequest(f"{name}={said[:80]}: only {allowed} is supported.")


def _parse_stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if (
        not isinstance(stops, list)
        or len(stops) > _STOPS
        or not all(isinstance(stop, str) and 1 <= len(stop) <= _LONGEST_STOP for stop in stops)
    ):
        raise BadRequest(
            f"stop must be a text of 1 to {_LONGEST_STOP} characters, or a list of up to {_STOPS} "
            "such texts."
        )
    return tuple(stops)


def _parse_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise BadRequest('stream_options needs "stream": true.')
    found = (options.get("include_usage") or False) if isinstance(options, dict) else None
    if not isinstance(found, bool) or set(options) - {"include_usage"}:
        raise BadRequest('stream_options takes only "include_usage", which is true or false.')
    return found


def build_rows(
    prompts: list[str], given: Mapping[str, Any], language: Language, longest: int
) -> list[Row]:
    """Returns a row for each prompt; arguments and errors as for `parse_completion`."""
    most = {"max_tokens": longest}
    numbers = {
        name: _parse_number(name, kind, given.get(name), most.get(name))
        for name, kind in _NUMBERS.items()
    }
    length, seed = numbers.pop("max_tokens"), numbers.pop("seed")
    length = _TOKENS if length is None else length
    if not 1 <= length <= longest:
        more = ", which the server's --tokens=N raises" if length > longest else ""
        raise BadRequest(f"max_tokens={length}: give 1 to {longest}{more}.")
    seed = secrets.randbits(32) if seed is None else seed
    if seed < 0:
        raise BadRequest(f"seed={seed}: give 0 to {_LARGEST}.")
    chosen = {name: value for name, value in numbers.items() if value is not None}
    try:
        sampling = Sampling(**chosen, tokens=language.vocabulary)
        longest_prompt = max(map(len, prompts))
        if longest_prompt > _LONGEST_TOKEN * language.context:  # encoding it could take minutes
            raise UserError(
                f"A prompt has {longest_prompt:,} characters, but the model's context is "
                f"{language.context:,} tokens: send only its end."
            )
        tokens = [language.encode(prompt) for prompt in prompts]
        language.writer.check(tokens, length)
        given_tokens, context = max(map(len, tokens)), language.context
        if given_tokens >= context:  # no token would fit after it
            raise UserError(
                f"A prompt has {given_tokens:,} tokens, but the model's context is {context:,}, of "
                f"which a prompt may take {context - 1:,}: send only its end."
            )
    except UserError as error:
        raise BadRequest(str(error)) from error
    return [Row(prompt, length, sampling, seed, place) for place, prompt in enumerate(tokens)]


def _parse_number(name: str, kind: type, value: Any, most: int | None) -> Any:
    if value is None:
        return None
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or abs(value) > _LARGEST:
        number = "a whole number" if kind is int else "a number"
        if most is not None:
            number += f" from 1 to {most}"
        if isinstance(value, str) and is_number(value):
            number += f', but "{value}" is a text: write it without quotes'
        raise BadRequest(f"{name} must be {number}.")
    return kind(value)


class Ending:
    """Finds the end of a text, which is before its first stop sequence.

    Characters that may begin a stop sequence are held back until the next characters arrive.

    Args:
        stops: the stop sequences.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._stops, self._held = stops, ""

    def add(self, text: str) -> tuple[str, bool]:
        """Returns the characters that are surely before a stop, and whether a stop follows."""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:  # the stop that ends first, as if the text came character by character
            _, place = min((place + len(stop), place) for place, stop in found)
            return text[:place], True
        held = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        """Returns the characters that were held back, at the end of the text."""
        return self._held


class Answer:
    """The answer to a request for text.

    Args:
        asked: the request.
        texts: the parts of each text, as `Texts.submit` returns them.
        language: the model.
        name: the name of the model.
    """

    def __init__(
        self,
        asked: Completion,
        texts: list[AsyncGenerator[list[int]]],
        language: Language,
        name: str,
    ):
        self._asked, self._texts, self._language = asked, texts, language
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    async def build_body(self) -> bytes:
        """Returns the body of the answer."""
        choices, tokens = [], 0
        for index, row in enumerate(self._asked.rows):
            if self._asked.stops:
                parts = [part async for part in self._iterate_text(index, row)]
                text, end = "".join(text for text, _, _ in parts), parts[-1][2]
                count = sum(count for _, count, _ in parts)
            else:  # decoded at once, which takes less time
                text, count = await join_parts(self._texts[index], self._language, row)
                end = _name_end(row, count)
            tokens += count
            choices.append(_build_choice(index, text, end))
        await self._end_texts()
        return orjson.dumps({**self._head, "choices": choices, "usage": self._count(tokens)})

    async def iterate_events(self) -> AsyncIterator[bytes]:
        """Yields server-sent events: text parts, prompt by prompt; usage, if asked for; [DONE]."""
        tokens, without = 0, {"usage": None} if self._asked.usage else {}
        for index, row in enumerate(self._asked.rows):
            async for text, count, end in self._iterate_text(index, row):
                tokens += count
                yield self._format_event(choices=[_build_choice(index, text, end)], **without)
        await self._end_texts()
        if self._asked.usage:
            yield self._format_event(choices=[], usage=self._count(tokens))
        yield b"data: [DONE]\n\n"

    async def _iterate_text(
        self, index: int, row: Row
    ) -> AsyncIterator[tuple[str, int, str | None]]:
        """Yields each part of a text, its number of tokens, and the finish reason or None."""
        decode, ending, count = self._language.decoder(row.prompt), Ending(self._asked.stops), 0
        async for part in self._texts[index]:
            count += len(part)
            text, ended = ending.add(decode(part))
            yield text, len(part), "stop" if ended else None
            if ended:
                return
        yield ending.finish(), 0, _name_end(row, count)

    async def _end_texts(self) -> None:
        """Stops generating texts that have already reached a stop sequence."""
        for parts in self._texts:
            await parts.aclose()

    def _count(self, tokens: int) -> dict[str, int]:
        prompts = sum(len(row.prompt) for row in self._asked.rows)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": tokens,
            "total_tokens": prompts + tokens,
        }

    def _format_event(self, **fields: Any) -> bytes:
        return b"data: " + orjson.dumps({**self._head, **fields}) + b"\n\n"


async def join_parts(
    parts: AsyncIterator[list[int]], language: Language, row: Row
) -> tuple[str, int]:
    """Returns a whole text, and the number of its tokens."""
    tokens = [token async for part in parts for token in part]
    return language.decoder(row.prompt)(tokens), len(tokens)


def _explain_count(count: int, things: str, most: int) -> str:
    more = ", which the server's --batch_size=N raises" if count > most else ""
    return f"There are {count} {things}: give 1 to {most}{more}."


def _name_end(row: Row, count: int) -> str:
    return "length" if count == row.length else "stop"


def _build_choice(index: int, text: str, end: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": end}


def parse_instances(given: Mapping[str, Any], most: int) -> tuple[list[str], Mapping[str, Any]]:
    """Returns the prompts of a request in Vertex AI's form, and its `parameters` by name.

    Raises:
        BadRequest: the request has another form, no prompts, or more than `most` prompts.
    """
    check_signature(given)
    found = given.get("instances")
    misplaced = sorted(set(given) & set(_NUMBERS))
    if misplaced:
        raise BadRequest(
            f'{misplaced[0]} is a parameter: write "parameters": {{"{misplaced[0]}": ...}}.'
        )
    if set(given) - {"instances", "parameters", "signature_name"} or not isinstance(found, list):
        raise BadRequest('Give {"instances": [{"prompt": "..."}], "parameters": {...}}.')
    prompts: list[Any] = [row.get("prompt") if isinstance(row, dict) else row for row in found]
    others = any(isinstance(row, dict) and set(row) != {"prompt"} for row in found)
    if others or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest(
            'An instance must be {"prompt": "..."}, or a text; max_tokens and others are '
            "parameters, the same for all."
        )
    if not 1 <= len(prompts) <= most:
        raise BadRequest(_explain_count(len(prompts), "instances", most))
    parameters = given.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise BadRequest(f"parameters must be an object, with some of {', '.join(_NUMBERS)}.")
    for name in sorted(set(parameters) - set(_NUMBERS)):
        hint = did_you_mean(name, _NUMBERS)
        raise BadRequest(f"There is no parameter {name[:80]!r}.{hint}")
    return prompts, parameters
