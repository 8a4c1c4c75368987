"""Serves a model until the process gets a signal to end."""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from tftpu.errors import UserError
from tftpu.inference.server.answering import Limits
from tftpu.inference.server.app import About, build_application
from tftpu.inference.server.protocol import TimeoutProtocol
from tftpu.inference.server.served import Refused, Served, check_outputs
from tftpu.inference.server.text import Language
from tftpu.runtime import leaving

_CONNECTIONS = 1000
GRACE_S = 30  # seconds for running requests after a signal to end
_SAME_S = 0.2  # seconds in which a repeated signal is ignored: `timeout -s INT` sends it twice
FAREWELL_S = 5  # seconds before the end of the grace period at which unfinished texts are ended


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address, but does not listen yet; port 0: any free one.

    Raises:
        UserError: the address is in use or not one of this machine, or the port is impossible.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named. Without it, small packets wait 44 ms.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        raise _explain_taken(host, port, error) from error
    return found


def listen(at: socket.socket) -> str:
    """Lets clients connect and returns the URL of a socket; `serve` answers them once it runs.

    Raises:
        UserError: another process has taken the address.
    """
    host, port = at.getsockname()[:2]
    try:
        at.listen()
    except OSError as error:
        raise _explain_taken(host, port, error) from error
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain_taken(host: str, port: int, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or "ports are 0 to 65535"  # OverflowError has none
    return UserError(
        f"Nothing can be served at {host}:{port} ({reason}): choose another --port (0 takes a free "
        "one) or --host."
    )


def warm(model: Served | Language) -> None:
    """Computes an answer, so that the first request finds the model loaded and compiled.

    Raises:
        UserError: the model cannot be served.
    """
    if isinstance(model, Served):
        try:
            check_outputs(model)
        except Refused as error:
            raise UserError(f"The model fails on two examples of zeros: {error}") from error
    else:
        from tftpu.inference.rows import Row
        from tftpu.inference.sampling import Sampling

        # Two tokens: the first comes from reading the prompt, the second from writing.
        for _ in model.writer.write([Row([0], 2, Sampling(tokens=model.vocabulary))]):
            pass
    # Without freezing, the garbage collector would scan the libraries' objects again and again,
    # which takes up to 0.2 s of a request.
    gc.collect()
    gc.freeze()


def serve(
    model: Served | Language,
    about: About,
    limits: Limits,
    at: socket.socket,
    ready: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
    compiled: Callable[[int, float], None] | None = None,
) -> None:
    """Serves a model until SIGTERM or SIGINT, and then answers the running requests.

    While it answers them, a second SIGINT ends the texts of a language model, and a third one ends
    the process. For other models, the second SIGINT already ends the process.

    Args:
        model: the model, which answers with arrays or with text.
        about: the model's name and routes.
        limits: the limits of requests.
        at: the socket, after `listen`.
        ready: a function that is called once requests are answered and signals are handled.
        stopping: a function that is called if requests are still running when the server stops.
        compiled: see `build_application`.
    """
    server = build_server(model, about, limits, ready, stopping, compiled)
    with _ends_quietly(server):
        server.run(sockets=[at])


def build_server(
    model: Served | Language,
    about: About,
    limits: Limits,
    ready: Callable[[], None] = lambda: None,
    stopping: Callable[[], None] = lambda: None,
    compiled: Callable[[int, float], None] | None = None,
    protocol: type[asyncio.Protocol] = TimeoutProtocol,
) -> uvicorn.Server:
    """Returns the server that `serve` runs; `protocol` is its HTTP protocol."""
    app = build_application(model, about, limits, compiled)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        access_log=False,
        log_level=logging.WARNING,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_S,
    )
    return _Server(config, app.state.stop, ready, stopping, isinstance(model, Language))


class _Server(uvicorn.Server):
    """A server that reports when it is ready, and ends texts before the grace period is over."""

    def __init__(
        self,
        config: uvicorn.Config,
        stop: Callable[[], None],
        ready: Callable[[], None],
        stopping: Callable[[], None],
        has_texts: bool,
    ):
        super().__init__(config)
        self._stop, self._ready, self._stopping = stop, ready, stopping
        self._loop: asyncio.AbstractEventLoop | None = None  # set once the server runs
        self._signalled = 0.0  # monotonic time of the last signal
        self._hurried = not has_texts  # whether texts were ended, or the model writes none

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends running texts at a second Ctrl-C, and the process at the next.

        uvicorn would cancel the requests, whose clients would get no reason.
        """
        before, self._signalled = self._signalled, time.monotonic()
        if sig != signal.SIGINT or not self.should_exit or self._loop is None:
            super().handle_exit(sig, frame)
        elif self._signalled - before < _SAME_S:
            return
        elif self._hurried:
            leaving.exit_at_once(128 + sig)
        else:
            self._hurried = True
            self._loop.call_soon_threadsafe(self._stop)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.tasks:
            self._stopping()
        farewell = asyncio.get_running_loop().call_later(GRACE_S - FAREWELL_S, self._stop)
        await super().shutdown(sockets)
        farewell.cancel()


@contextmanager
def _ends_quietly(server: uvicorn.Server) -> Iterator[None]:
    """Lets signals end the server quietly before and after uvicorn handles them.

    uvicorn raises a signal again after it has ended the server.
    """

    def end(*_: object) -> None:
        server.should_exit = True

    handlers = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
