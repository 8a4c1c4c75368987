"""The routes of the server: Vertex AI's, TensorFlow Serving's, and OpenAI's completions."""

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tftpu.errors import UserError, find_nearest
from tftpu.inference.server import answers, origins, payloads
from tftpu.inference.server.answering import LONG, Answer, Answered, Limits, as_error, as_json
from tftpu.inference.server.batching import Batcher
from tftpu.inference.server.counts import Counts
from tftpu.inference.server.served import Arrays, Refused, Served
from tftpu.inference.server.text import Language, Texts

if TYPE_CHECKING:
    from tftpu.inference.rows import Row
    from tftpu.inference.server.completions import Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """Facts about the model that the routes show.

    Attributes:
        name: the model's name in the addresses of TensorFlow Serving.
        version: the model's version in these addresses, 1 or more.
        health, predict: the paths of Vertex AI's routes.
        hosts: the host names by which requests may address the server; see `origins.OwnHosts`.

    Raises:
        UserError: one of the names cannot be part of an address.
    """

    name: str
    version: int = 1
    health: str = "/health"
    predict: str = "/predict"
    hosts: tuple[str, ...] = origins.LOOPBACK

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*", self.name, re.ASCII):
            raise UserError(
                f"--name={self.name} becomes part of addresses: use letters, digits, and the "
                "characters _ . -"
            )
        for name in "health", "predict":
            route = getattr(self, name)
            if not re.fullmatch(r"/[\w.:/-]*", route, re.ASCII):
                raise UserError(f"AIP_{name.upper()}_ROUTE={route} is not a route such as /{name}.")


def build_application(
    model: Served | Language,
    about: About,
    limits: Limits,
    compiled: Callable[[int, float], None] | None = None,
) -> Starlette:
    """Returns the server of a model, as an ASGI application; its `state.stop()` ends running texts.

    Args:
        model: the model, which answers with arrays or with text.
        about: the model's name and routes.
        limits: the limits of requests.
        compiled: a function that `Texts.compile_ahead` calls once a language model's usual sizes
            are compiled; None: requests compile their sizes.
    """
    counts = Counts()
    if isinstance(model, Served):
        work: Batcher | Texts = Batcher(model.call, limits.batch, limits.waiting, counts.batch)
        answered = Answered(limits, counts, lambda: False)
        encoder = _build_encoder(model, limits)
        predict = _build_predictions_route(model, work, encoder, limits, answered)
    else:
        work = texts = Texts(model, limits.batch, limits.waiting, counts.batch)
        answered = Answered(limits, counts, lambda: texts.compiling)
        encoder = None
        predict = _build_texts_routes(model, work, limits, answered)
    works = [work] if encoder is None else [work, encoder]
    counts.set_gauge(lambda: sum(one.waiting for one in works))
    task: set[asyncio.Task[None]] = set()
    ahead: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task.update(asyncio.create_task(one.run()) for one in works)
        if isinstance(model, Language) and isinstance(work, Texts) and compiled is not None:
            sizes = model.list_further_sizes(limits.batch)
            ahead.add(asyncio.create_task(work.compile_ahead(sizes, compiled)))
        yield
        for running in (*task, *ahead):
            running.cancel()

    async def health(_: Request) -> Response:
        if any(running.done() for running in task):
            return as_error("The model stopped.", 500, about.health)
        return as_json(b"{}")

    async def metrics(_: Request) -> Response:
        return Response(counts.format_text(), media_type=counts.media_type)

    model_at = f"/v1/models/{about.name}"
    versions = model_at, f"{model_at}/versions/{about.version}"
    routes = [
        Route(about.health, health),
        Route("/metrics", metrics),
        Route(about.predict, answered(predict, "predict"), methods=["POST"]),
        *(Route(at, _build_status_route(about)) for at in versions),
        *(Route(f"{at}/metadata", _build_metadata_route(model, about)) for at in versions),
        *(
            Route(f"{at}:predict", answered(predict, "predict"), methods=["POST"])
            for at in versions
        ),
    ]
    if isinstance(model, Language) and isinstance(work, Texts):
        complete = answered(
            _build_completions_route(model, work, about.name, limits, answered), "completions"
        )
        routes.append(Route(answers.COMPLETIONS, complete, methods=["POST"]))
        routes.append(Route(answers.MODELS, _build_models_route(about)))
    failures = {HTTPException: _build_refusal(routes, model, counts)}
    own = [Middleware(origins.OwnHosts, hosts=about.hosts)]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=failures, middleware=own)
    app.router.redirect_slashes = False  # a redirect would go to the host that the client named
    app.state.stop = work.stop if isinstance(work, Texts) else lambda: None
    return app


def _build_encoder(model: Served, limits: Limits) -> Batcher | None:
    """Returns a batcher for a model's encoder, which need not be thread-safe; None without one."""
    encode = model.encode
    if encode is None:
        return None

    def call(given: Mapping[str, np.ndarray]) -> Arrays:
        [text], [place] = given[payloads.SENTENCE], given["place"]
        try:
            return encode([text])
        except Refused as error:
            raise Refused(f"Instance {place}: {error}") from error

    # One text a batch, so that encoding can stop after any text if the client is gone.
    return Batcher(call, 1, limits.waiting, lambda _: None)


def _build_predictions_route(
    model: Served, batcher: Batcher, encoder: Batcher | None, limits: Limits, answered: Answered
) -> Answer:
    most_texts = limits.batch if encoder is not None else 0

    def parse(given: dict[str, Any]) -> payloads.Request:
        return payloads.parse_request(given, model.inputs, most_texts)

    async def answer(body: bytearray) -> Response:
        asked = await answered.parse(parse, body)
        if asked.texts and encoder is not None:
            places = np.arange(asked.count)
            texts = {payloads.SENTENCE: np.array(asked.texts, object), "place": places}
            arrays = await encoder.compute_outputs(texts, asked.count)
            asked = dataclasses.replace(asked, arrays=arrays)
        found = await batcher.compute_outputs(asked.arrays, asked.count)
        if sum(value.nbytes for value in found.values()) > LONG:
            return as_json(await asyncio.to_thread(answers.format_answer, found, asked.rows))
        return as_json(answers.format_answer(found, asked.rows))

    return answer


def _build_texts_routes(
    model: Language, texts: Texts, limits: Limits, answered: Answered
) -> Answer:
    """Returns a function that answers a request whose instances are prompts, as in Vertex AI."""
    from tftpu.inference.server import completions

    def parse(given: dict[str, Any]) -> "list[Row]":
        prompts, parameters = completions.parse_instances(given, limits.batch)
        return completions.build_rows(prompts, parameters, model, limits.tokens)

    async def answer(body: bytearray) -> Response:
        rows = await answered.parse(parse, body)
        found = []
        for row, parts in zip(rows, texts.submit(rows)):
            text, tokens = await completions.join_parts(parts, model, row)
            found.append({"text": text, "tokens": tokens})
        return as_json(orjson.dumps({"predictions": found}))

    return answer


def _build_completions_route(
    model: Language, texts: Texts, name: str, limits: Limits, answered: Answered
) -> Answer:
    from tftpu.inference.server import completions

    def parse(given: dict[str, Any]) -> "Completion":
        completions.check_model(given, name)
        return completions.parse_completion(given, model, limits.tokens, limits.batch)

    async def answer(body: bytearray) -> Response:
        asked = await answered.parse(parse, body)
        written = completions.Answer(asked, texts.submit(asked.rows), model, name)
        if not asked.stream:
            return as_json(await written.build_body())
        events = written.iterate_events()
        first = await anext(events)  # an error up to here gets an HTTP error status
        return StreamingResponse(
            answered.follow_events(first, events), media_type="text/event-stream"
        )

    return answer


def _build_status_route(about: About) -> Callable[[Request], Awaitable[Response]]:
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
        return as_json(body)

    return status


def _build_models_route(about: About) -> Callable[[Request], Awaitable[Response]]:
    model = {"id": about.name, "object": "model", "created": int(time.time()), "owned_by": "tftpu"}
    body = orjson.dumps({"object": "list", "data": [model]})

    async def models(_: Request) -> Response:
        return as_json(body)

    return models


def _build_metadata_route(
    model: Served | Language, about: About
) -> Callable[[Request], Awaitable[Response]]:
    if isinstance(model, Served):
        inputs = {i.name: {"dtype": i.dtype, "shape": [-1, *i.shape]} for i in model.inputs}
        outputs = list(model.outputs)
    else:
        inputs = {"prompt": {"dtype": "string", "shape": [-1]}}
        outputs = ["text", "tokens"]
    spec = {"name": about.name, "version": str(about.version)}
    body = orjson.dumps({"model_spec": spec, "metadata": {"inputs": inputs, "outputs": outputs}})

    async def metadata(_: Request) -> Response:
        return as_json(body)

    return metadata


def _build_refusal(
    routes: list[Route], model: Served | Language, counts: Counts
) -> Callable[[Request, Exception], Response]:
    # The address that a person most likely wants comes first.
    paths = sorted((route.path for route in routes), key=lambda path: path != answers.COMPLETIONS)
    addresses = ", ".join(paths)

    def _suggest_method(request: Request) -> str:
        at, path = str(request.base_url).rstrip("/"), request.url.path
        known = {route.path: route.methods or () for route in routes}
        if "POST" not in known.get(path, ()):
            return f"Use GET: curl {at}{path}"
        # No complete shell command: JSON would escape its quotes, so it could not be pasted.
        field = '"prompt": "..."' if path == answers.COMPLETIONS else '"instances": [...]'
        return f"Use POST with a body of JSON, {{{field}}}, as in the line that the server printed."

    def _hint_at_texts(request: Request) -> str:
        if not request.url.path.endswith("/completions"):
            return ""
        if isinstance(model, Language):
            return f" There is no chat: send the whole chat to {answers.COMPLETIONS} as a prompt."
        return " This model answers with arrays: serve the run of a language model for texts."

    def refusal(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        counts.count_refusal(status)
        hint = _hint_at_texts(request)
        path = request.url.path
        # OpenAI's addresses are not misspellings of the existing ones.
        near = None if path in answers.OPENAI else find_nearest(path, [r.path for r in routes])
        known = f"Did you mean {near!r}?" if near else f"There are {addresses}."
        said = {
            404: f"There is nothing at this address. {known}{hint}",
            405: f"This address does not answer {request.method}. {_suggest_method(request)}",
        }
        headers = error.headers if isinstance(error, HTTPException) else None
        return as_error(said.get(status, str(error)), status, path, headers)

    return refusal
