"""The limits, counts and error messages of all routes whose requests have a body."""

import asyncio
import concurrent.futures
import ctypes
import dataclasses
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tftpu.amounts import format_size
from tftpu.errors import NotFiniteError
from tftpu.inference.server import answers, payloads
from tftpu.inference.server.answers import BadRequest, UnknownModel
from tftpu.inference.server.batching import Busy
from tftpu.inference.server.counts import Counts
from tftpu.inference.server.served import Refused
from tftpu.inference.server.text import Stopped

Answer = Callable[[bytearray], Awaitable[Response]]
_T = TypeVar("_T")
LONG = 2**16  # bytes of JSON that the event loop itself may parse
_LONGEST = 2**18  # bytes of a body; larger ones are parsed one at a time
_BODIES = 16  # bodies of the largest size that the server may hold at a time
_IGNORED = 4  # a body larger than this multiple of the limit is not read to its end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a single request, and of all requests together.

    Attributes:
        batch: the most examples, or texts, that are computed at once.
        waiting: the most examples, or texts, that may wait; further requests are rejected.
        body: the most bytes of a request's body.
        seconds: the most seconds to wait for a request's body, and then for the answer; for a
            streamed text, the most seconds to wait for each part.
        tokens: the most tokens to write for one prompt.
    """

    batch: int = 64
    waiting: int = 1024
    body: int = 16 * 2**20
    seconds: float = 60.0
    tokens: int = 1024


class _Slow(Exception):  # noqa: N818 (an answer, not a failure of the server)
    """A request's body does not arrive in time."""


class _Large(Exception):  # noqa: N818
    """A request's body is larger than the limit."""


class _NotJson(Exception):  # noqa: N818
    """A request does not declare its body as JSON."""


_STATUSES = {  # HTTP statuses of errors that are not failures of the server.
    BadRequest: 400,
    Refused: 400,
    UnknownModel: 404,
    ClientDisconnect: 499,  # the status that nginx logs; no client reads it
    _Slow: 408,
    _Large: 413,
    MemoryError: 413,
    _NotJson: 415,
    Busy: 429,
    Stopped: 503,
    TimeoutError: 504,
}


class Answered:
    """Turns functions of a request's body into routes with limits, counts and error messages.

    Args:
        limits: the limits of requests.
        counts: the metrics, in which answers are counted.
        is_compiling: a function that returns whether answers wait for a model to be compiled.
    """

    def __init__(self, limits: Limits, counts: Counts, is_compiling: Callable[[], bool]):
        self._limits, self._counts, self._is_compiling = limits, counts, is_compiling
        self._held = 0  # total bytes of the bodies in memory
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "reader")

    def __call__(self, answer: Answer, route: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            start = time.perf_counter()
            response = await self._answer(answer, request)
            self._counts.count_request(route, response.status_code, time.perf_counter() - start)
            return response

        return endpoint

    async def _answer(self, answer: Answer, request: Request) -> Response:
        body = bytearray()
        try:
            await self._read(request, body)
            async with asyncio.timeout(self._limits.seconds):
                return await _wait_unless_gone(request, answer(body))
        except Exception as error:  # one request must not end the server
            return self._explain(error, request.scope["path"])
        finally:
            size = len(body)
            self._held -= size
            body.clear()
            if size > _LONGEST:
                _release_memory()

    async def parse(self, parse: Callable[[dict[str, Any]], _T], body: bytearray) -> _T:
        """Returns the parsed content of a body; a large body is parsed in a thread.

        The largest bodies are parsed one at a time: while one is parsed, no other Python code runs,
        and its objects take many times its memory. A pause of equal length follows for other code.
        """

        def read() -> _T:
            begun = time.perf_counter()
            given = payloads.parse_body(body, self._limits.body)
            if len(body) > _LONGEST:
                time.sleep(time.perf_counter() - begun)
            return parse(given)

        if len(body) <= LONG:
            return read()
        reader = self._reader if len(body) > _LONGEST else None
        return await asyncio.get_running_loop().run_in_executor(reader, read)

    def _explain(self, error: Exception, path: str) -> Response:
        """Returns the answer for an error, and frees the objects that its traceback holds."""
        known = next((s for kind, s in _STATUSES.items() if isinstance(error, kind)), None)
        if known is None:
            self._counts.log_failure(error)
        said = (
            _describe_failure(error) if known is None else self._describe_error(error) or str(error)
        )
        _forget(error)
        headers = {"Retry-After": "1"} if known == 429 else None
        return as_error(said, known or 500, path, headers)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Reads the body of a request into `body`, within the limits."""
        kind = request.headers.get("content-type", "").partition(";")[0]
        # Without this check, any page in a browser could send requests.
        if kind.strip().lower() != "application/json":
            raise _NotJson
        most, size = self._limits.body, 0
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > _IGNORED * most:
            raise _Large
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > _IGNORED * most:
                        raise _Large
                    # Reads the rest, as some clients send everything before they read an answer.
                    if size > most:
                        continue
                    if self._held + len(part) > _BODIES * most:
                        raise Busy
                    self._held += len(part)
                    body += part
        except TimeoutError as error:
            raise _Slow from error
        if size > most:
            raise _Large

    def _describe_error(self, error: Exception) -> str | None:
        """Returns the message for an error of a type without messages; None for other types."""
        seconds = self._limits.seconds
        return {
            _Slow: f"The body took longer than {seconds:g} s, the server's --timeout.",
            _Large: f"The body exceeds {format_size(self._limits.body)}, the server's --body_mib.",
            _NotJson: "Send JSON, and its header; with curl, -H 'Content-Type: application/json'.",
            MemoryError: "The server lacks the memory for this request: send fewer examples.",
            Busy: "Too many requests wait: try again later, or raise the server's --waiting or "
            "--body_mib.",
            TimeoutError: f"The answer took longer than {seconds:g} s, the server's --timeout."
            + self._explain_compiling(),
        }.get(type(error))

    def _explain_compiling(self) -> str:
        if not self._is_compiling():
            return ""
        return (
            " It is compiling for this size of request, once. Send the request again in a minute."
        )

    async def follow_events(
        self, first: bytes, events: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Yields events; if the next one is late or fails, ends with an event that says why."""
        yield first
        seconds = self._limits.seconds
        try:
            while True:
                async with asyncio.timeout(seconds):
                    event = await anext(events, None)
                if event is None:
                    return
                yield event
        except Stopped as error:
            said = f"The text ends here: {error}."
        except TimeoutError:
            said = f"The text ends here: the next part took longer than {seconds:g} s."
            said += self._explain_compiling()
        except Exception as error:
            self._counts.log_failure(error)
            said = _describe_failure(error)
            _forget(error)
        yield b"data: " + answers.format_error(said, 500, answers.COMPLETIONS) + b"\n\n"


def _describe_failure(error: Exception) -> str:
    """Returns a failure's message for a client, which names only its kind; the log has the rest."""
    if isinstance(error, NotFiniteError):
        return str(error)
    return f"The model failed: {type(error).__name__}."


def _forget(error: BaseException) -> None:
    """Frees the objects in the frames of an error: the parsed body, the arrays of a batch.

    Some of these frames hold the task or the future that holds the error. Only the garbage
    collector would find this cycle, after many more requests.
    """
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


def _release_memory() -> None:
    """Returns freed memory to the system, which glibc would keep for each of its threads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has this function
    if trim is not None:
        trim(0)


async def _wait_unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """Returns an answer; if the client leaves, cancels it and raises `ClientDisconnect`."""
    answered = asyncio.ensure_future(answer)
    # After the body, the next message can only be that the client has left.
    left = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((answered, left), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise ClientDisconnect
        return answered.result()
    finally:
        answered.cancel()
        left.cancel()


def as_json(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a JSON answer."""
    return Response(body, status, headers, media_type="application/json")


def as_error(
    message: str, status: int, path: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an answer with an error message; see `answers.format_error`."""
    return as_json(answers.format_error(message, status, path), status, headers)
