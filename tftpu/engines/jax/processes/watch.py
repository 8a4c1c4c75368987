"""Ends this process when another host is lost.

A process that waits for another one in a device computation cannot be interrupted: on a TPU, and
with gloo, it waits forever. So each host publishes a counter that it increases, and reads the
others' counters. A host whose counter stops is lost, whether killed, stopped or disconnected.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from tftpu.runtime import hosts

_BEATS = 6  # heartbeats in the time after which a host counts as lost
_LEFT = "left"  # the text of a host that ends normally, instead of its counter


class Store:
    """A key-value store of texts that all hosts share.

    Args:
        client: the client of JAX's coordination service.
    """

    def __init__(self, client: Any):
        self._client = client

    def put(self, name: str, text: str) -> None:
        """Sets a text.

        Raises:
            JaxRuntimeError: the first host does not answer.
        """
        self._client.key_value_set(f"tftpu/{name}", text, True)

    def read_texts(self, name: str) -> dict[str, str]:
        """Returns the texts whose names begin with `name/`, by the last part of their names."""
        found = self._client.key_value_dir_get(f"tftpu/{name}/")
        return {key.rpartition("/")[2]: text for key, text in found}

    def wait_for(self, name: str) -> str:
        """Returns a text as soon as a host sets it."""
        while True:
            # An error means that no host has set the text yet. If a host is lost, `Watch` ends the
            # process.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                return self._client.blocking_key_value_get(f"tftpu/{name}", 60_000)
            time.sleep(0.1)

    def remove(self, name: str) -> None:
        """Removes a text; a name that ends in a slash removes all texts that begin with it."""
        self._client.key_value_delete(f"tftpu/{name}")


class Watch:
    """A watch over the other hosts, in threads, which ends this process if one of them is lost.

    Args:
        store: the store that all hosts see.
        index: the index of this host.
        count: the number of hosts.
        seconds: the seconds without a sign of life after which a host is lost.

    Attributes:
        store, index, count: the arguments.
    """

    def __init__(self, store: Store, index: int, count: int, seconds: float):
        self.store, self.index, self.count = store, index, count
        self._seconds = seconds
        now = time.monotonic()
        self._seen = {other: (now, "") for other in range(count) if other != index}
        self._answered = now  # the time of the store's last answer
        self._working = 0  # number of open blocks of `together`
        self._leaving = threading.Event()
        for name, target in (("beats", self._send_beats), ("lost-hosts", self._watch_hosts)):
            threading.Thread(target=target, name=name, daemon=True).start()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Makes hosts that end normally count as lost during the block, which all hosts enter."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def leave(self, limit: float) -> bool:
        """Announces that this host ends; returns True once all others do, False if they do not.

        Args:
            limit: the seconds to wait for the others; a lost host ends the wait early.
        """
        self._leaving.set()
        end = time.monotonic() + limit
        while time.monotonic() < end and not self._find_silent():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._exchange_texts(_LEFT)
                if all(text == _LEFT for _, text in self._seen.values()):
                    return True
            time.sleep(0.05)
        return False

    # Methods that run in threads

    def _send_beats(self) -> None:
        beats = 0
        while not self._leaving.is_set():
            beats += 1
            # `_find_silent` measures how long the store has not answered
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._exchange_texts(str(beats))
            self._leaving.wait(self._seconds / _BEATS)

    def _exchange_texts(self, own: str) -> None:
        """Publishes this host's text, and reads the texts of the other hosts."""
        self.store.put(f"hosts/{self.index}", own)
        found = self.store.read_texts("hosts")
        now = self._answered = time.monotonic()
        for other, (_, before) in list(self._seen.items()):
            text = found.get(str(other), "")
            if text != before:
                self._seen[other] = now, text

    def _watch_hosts(self) -> None:
        while not self._leaving.wait(min(1.0, self._seconds / _BEATS)):
            lost = self._find_silent() or self._find_gone()
            if lost and not self._leaving.is_set():
                hosts.exit_as_lost(lost)

    def _find_silent(self) -> str | None:
        """Returns a message about a host without a sign of life; None if there is none."""
        now = time.monotonic()
        if now - self._answered > self._seconds:
            return f"Host 0 was lost: it has not answered for {self._seconds:.0f} s."
        for other, (heard, text) in self._seen.items():
            if text != _LEFT and now - heard > self._seconds:
                return f"Host {other} was lost: no sign of life for {self._seconds:.0f} s."
        return None

    def _find_gone(self) -> str | None:
        """Returns a message about a host that ended while this one needs it; None if none did."""
        for other, (heard, text) in self._seen.items():
            # Waits, because hosts that end together leave `together` at slightly different times.
            if text == _LEFT and self._working and time.monotonic() - heard > self._seconds / 2:
                return f"Host {other} ended while this one was waiting for it: see its output."
        return None
