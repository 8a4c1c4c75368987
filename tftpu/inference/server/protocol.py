"""HTTP connections that are closed if their client is idle for too long."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimeoutProtocol(H11Protocol):
    """uvicorn's protocol, with time limits for a client that is expected to send or read.

    uvicorn waits forever for the head of the first request, for the rest of a body that was
    answered before its end, and for a client that does not read. A thousand such connections would
    keep everybody else out.

    Attributes:
        head_s: the seconds in which the head of a request must arrive, and in which a client must
            read some of an answer.
        rest_s: the seconds for which the rest of a body is read and ignored, so that its sender
            sees the answer.
    """

    head_s = 20.0
    rest_s = 5.0
    _timer: asyncio.TimerHandle | None = None
    _unread: float = float("inf")  # bytes of the answer that were unsent when the timer was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time limit for the head of a request."""
        super().connection_made(transport)
        self._wait(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends any time limit."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Ends the time limit once the head of a request has arrived."""
        super().handle_events()
        if self._is_answering():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Starts the limit for the head of the next request, or the rest of this one's body."""
        rest = self.conn.their_state is h11.SEND_BODY
        self._wait(self.rest_s if rest else self.head_s)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Starts the time limit for the client to read some of the answer."""
        super().pause_writing()
        self._wait(self.head_s)

    def resume_writing(self) -> None:
        """Ends the time limit of `pause_writing`, unless the answer is complete."""
        super().resume_writing()
        if self._is_answering():
            self._stop_waiting()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._end)

    def _stop_waiting(self) -> None:
        self._unread = float("inf")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        """Closes the connection, unless the client has read more of an answer since."""
        unread = self.transport.get_write_buffer_size()
        if 0 < unread < self._unread:
            self._wait(self.head_s)
            self._unread = unread
        else:
            self.transport.abort()
