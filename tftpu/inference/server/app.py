"""The routes of the server: Vertex AI's, TensorFlow Serving's, and OpenAI's completions."""

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tftpu.errors import UserError
from tftpu.inference.server import payloads
from tftpu.inference.server.batching import Batcher, Busy
from tftpu.inference.server.counts import Counts
from tftpu.inference.server.payloads import BadRequest
from tftpu.inference.server.served import Refused, Served
from tftpu.inference.server.text import Language, Stopped, Texts

if TYPE_CHECKING:
    from tftpu.inference.generate import Row
    from tftpu.inference.server.completions import Completion

Answer = Callable[[bytearray], Awaitable[Response]]
_T = TypeVar("_T")
_BODIES = 16  # of the largest size, that are held at once
_IGNORED = 4  # times the largest size: what is read of a body that is too large
_LONG = 2**16  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request, and of all together.

    Attributes:
        batch: examples, or texts, that are computed at once.
        waiting: examples, or texts, that may wait; further requests are refused.
        body: bytes of a request.
        seconds: until the body has come, and until the answer; of a streamed text, until its next
            part.
        tokens: to write for one prompt.
    """

    batch: int = 64
    waiting: int = 1024
    body: int = 16 * 2**20
    seconds: float = 60.0
    tokens: int = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """Facts that the routes say of the model.

    Attributes:
        name: in the addresses of TensorFlow Serving.
        version: likewise, 1 or more.
        health, predict: Vertex AI's routes.

    Raises:
        UserError: one of them cannot be part of an address.
    """

    name: str
    version: int = 1
    health: str = "/health"
    predict: str = "/predict"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*", self.name, re.ASCII):
            raise UserError(
                f"--name={self.name}: give letters, digits, and _ . - for the name in addresses."
            )
        for name in "health", "predict":
            route = getattr(self, name)
            if not re.fullmatch(r"/[\w.:/-]*", route, re.ASCII):
                raise UserError(f"AIP_{name.upper()}_ROUTE={route} is no route such as /{name}.")


def application(model: Served | Language, about: About, limits: Limits) -> Starlette:
    """Returns the server of a model, as an ASGI application; `state.stop()` ends running texts.

    Args:
        model: answers with arrays, or with text.
        about: its name and routes.
        limits: of requests.
    """
    counts = Counts()
    if isinstance(model, Served):
        work: Batcher | Texts = Batcher(model.call, limits.batch, limits.waiting, counts.batch)
        predict = _predictions(model, work)
    else:
        work = Texts(model.writer, limits.batch, limits.waiting, counts.batch)
        predict = _texts(model, work, limits)
    counts.gauge(lambda: work.waiting)
    task: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task.add(asyncio.create_task(work.run()))
        yield
        for running in task:
            running.cancel()

    async def health(_: Request) -> Response:
        alive = any(not running.done() for running in task)
        return _json(
            b"{}" if alive else payloads.error("The model stopped."), 200 if alive else 500
        )

    async def metrics(_: Request) -> Response:
        return Response(counts.text(), media_type=counts.media_type)

    answered = _Answered(limits, counts)
    model_at = f"/v1/models/{about.name}"
    versions = model_at, f"{model_at}/versions/{about.version}"
    routes = [
        Route(about.health, health),
        Route("/metrics", metrics),
        Route(about.predict, answered(predict, "predict"), methods=["POST"]),
        *(Route(at, _status(about)) for at in versions),
        *(Route(f"{at}/metadata", _metadata(model, about)) for at in versions),
        *(
            Route(f"{at}:predict", answered(predict, "predict"), methods=["POST"])
            for at in versions
        ),
    ]
    if isinstance(model, Language) and isinstance(work, Texts):
        complete = answered(_completions(model, work, about.name, limits), "completions")
        routes.append(Route("/v1/completions", complete, methods=["POST"]))
    failures = {HTTPException: _refusal(routes)}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=failures)
    app.state.stop = work.stop if isinstance(work, Texts) else lambda: None
    return app


class _Slow(Exception):  # noqa: N818 (an answer, not a failure of the server)
    """A body that does not arrive."""


class _Large(Exception):  # noqa: N818
    """A body beyond the limit."""


class _Answered:
    """Turns functions of bodies into routes that limit, count, and explain."""

    def __init__(self, limits: Limits, counts: Counts):
        self._limits, self._counts = limits, counts
        self._held = 0  # bytes of the bodies of all requests

    def __call__(self, answer: Answer, route: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            start = time.perf_counter()
            response = await self._answer(answer, request)
            self._counts.request(route, response.status_code, time.perf_counter() - start)
            return response

        return endpoint

    async def _answer(self, answer: Answer, request: Request) -> Response:
        body = bytearray()
        try:
            await self._read(request, body)
            async with asyncio.timeout(self._limits.seconds):
                return await _unless_gone(request, answer(body))
        except tuple(_STATUSES) as error:
            status = next(s for kind, s in _STATUSES.items() if isinstance(error, kind))
            headers = {"Retry-After": "1"} if status == 429 else None
            return _json(payloads.error(self._said(status) or str(error)), status, headers)
        except Exception as error:  # one request must not end the server
            self._counts.failure(error)
            said = f"The model failed: {type(error).__name__}."
            return _json(payloads.error(said), 500)
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Reads the body of a request."""
        most, size = self._limits.body, 0
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > _IGNORED * most:
            raise _Large
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > _IGNORED * most:
                        raise _Large
                    if size > most:  # clients that send first, and read then, get the answer
                        continue
                    if self._held + len(part) > _BODIES * most:
                        raise Busy
                    self._held += len(part)
                    body += part
        except TimeoutError as error:
            raise _Slow from error
        if size > most:
            raise _Large

    def _said(self, status: int) -> str | None:
        seconds = self._limits.seconds
        return {
            408: f"The body took longer than {seconds:g} s.",
            413: f"A body may have {self._limits.body / 2**20:g} MiB.",
            429: "Too many requests wait: try again later.",
            504: f"The answer took longer than {seconds:g} s.",
        }.get(status)


_STATUSES = {  # of answers to what is no failure of the server
    BadRequest: 400,
    Refused: 400,
    UserError: 400,
    ClientDisconnect: 499,  # as nginx counts them; nobody reads it
    _Slow: 408,
    _Large: 413,
    Busy: 429,
    Stopped: 503,
    TimeoutError: 504,
}


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """Returns an answer; gives up what is computed for a client that has left."""
    answered = asyncio.ensure_future(answer)
    left = asyncio.ensure_future(request.receive())  # the next message is that of its end
    try:
        await asyncio.wait((answered, left), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise ClientDisconnect
        return answered.result()
    finally:
        answered.cancel()
        left.cancel()


async def _parsed(parse: Callable[[bytearray], _T], body: bytearray) -> _T:
    """Returns what a body says; a large one is read in a thread, beside other requests."""
    return await asyncio.to_thread(parse, body) if len(body) > _LONG else parse(body)


def _predictions(model: Served, batcher: Batcher) -> Answer:
    def parse(body: bytearray) -> payloads.Request:
        return payloads.request(payloads.parsed(body), model.inputs)

    async def answer(body: bytearray) -> Response:
        asked = await _parsed(parse, body)
        found = await batcher.outputs(asked.arrays, asked.count)
        if sum(value.nbytes for value in found.values()) > _LONG:
            return _json(await asyncio.to_thread(payloads.answer, found, asked))
        return _json(payloads.answer(found, asked))

    return answer


def _texts(model: Language, texts: Texts, limits: Limits) -> Answer:
    """Returns the texts of Vertex AI's and TensorFlow Serving's requests: prompts as instances."""
    from tftpu.inference.server import completions

    def parse(body: bytearray) -> "list[Row]":
        prompts, given = completions.instances(payloads.parsed(body), limits.batch)
        return completions.rows(prompts, given, model, limits.tokens)

    async def answer(body: bytearray) -> Response:
        rows = await _parsed(parse, body)
        found = []
        for row, parts in zip(rows, texts.ask(rows)):
            text, tokens = await completions.joined(parts, model, row)
            found.append({"text": text, "tokens": tokens})
        return _json(orjson.dumps({"predictions": found}))

    return answer


def _completions(model: Language, texts: Texts, name: str, limits: Limits) -> Answer:
    from tftpu.inference.server import completions

    def parse(body: bytearray) -> "Completion":
        given = payloads.parsed(body)
        return completions.completion(given, model, limits.tokens, limits.batch)

    async def answer(body: bytearray) -> Response:
        asked = await _parsed(parse, body)
        written = completions.Answer(asked, texts.ask(asked.rows), model, name)
        if not asked.stream:
            return _json(await written.whole())
        events = written.events()
        first = await anext(events)  # what fails at once is still answered by a status
        return StreamingResponse(
            _timed(first, events, limits.seconds), media_type="text/event-stream"
        )

    return answer


async def _timed(
    first: bytes, events: AsyncIterator[bytes], seconds: float
) -> AsyncIterator[bytes]:
    """Yields events; ends with one that says why, should the next be too late or fail."""
    yield first
    try:
        while True:
            async with asyncio.timeout(seconds):
                event = await anext(events, None)
            if event is None:
                return
            yield event
    except Exception as error:
        late = f"the next part took longer than {seconds:g} s"
        said = late if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        said = f"The text ends here: {said.rstrip('.')}."
        yield b"data: " + payloads.error(said) + b"\n\n"


def _status(about: About) -> Callable[[Request], Awaitable[Response]]:
    body = orjson.dumps(
        {
            "model_version_status": [
                {
                    "version": str(about.version),
                    "state": "AVAILABLE",
                    "status": {"error_code": "OK", "error_message": ""},
                }
            ]
        }
    )

    async def status(_: Request) -> Response:
        return _json(body)

    return status


def _metadata(model: Served | Language, about: About) -> Callable[[Request], Awaitable[Response]]:
    if isinstance(model, Served):
        inputs = {i.name: {"dtype": i.dtype, "shape": [-1, *i.shape]} for i in model.inputs}
        outputs = list(model.outputs)
    else:
        inputs = {"prompt": {"dtype": "string", "shape": [-1]}}
        outputs = ["text", "tokens"]
    spec = {"name": about.name, "version": str(about.version)}
    body = orjson.dumps({"model_spec": spec, "metadata": {"inputs": inputs, "outputs": outputs}})

    async def metadata(_: Request) -> Response:
        return _json(body)

    return metadata


def _refusal(routes: list[Route]) -> Callable[[Request, Exception], Response]:
    addresses = ", ".join(route.path for route in routes)

    def refusal(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        said = {
            404: f"There is nothing at this address. There are {addresses}.",
            405: f"This address does not answer {request.method}.",
        }
        headers = error.headers if isinstance(error, HTTPException) else None
        return _json(payloads.error(said.get(status, str(error))), status, headers)

    return refusal


def _json(body: bytes, status: int = 200, headers: Any = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
