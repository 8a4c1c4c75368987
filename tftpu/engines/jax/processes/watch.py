"""Notices hosts that are lost, and ends this process then.

A process that waits for another one on a device cannot be woken: on a TPU, and over gloo, it waits
without end. So each host shows a count that rises, and looks at those of the others. One whose
count stands still is lost, whether it was killed, stopped or cut off.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from tftpu.runtime import hosts

_BEATS = 6  # in the time after which a host is lost
_LEFT = "left"


class Store:
    """Texts by name, which all hosts see.

    Args:
        client: of JAX's coordination service.
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
        """Returns the texts whose names begin with a name and a slash, by the rest."""
        found = self._client.key_value_dir_get(f"tftpu/{name}/")
        return {key.rpartition("/")[2]: text for key, text in found}

    def wait_for(self, name: str) -> str:
        """Returns a text as soon as a host sets it."""
        while True:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # not yet; `Watch` ends the wait
                return self._client.blocking_key_value_get(f"tftpu/{name}", 60_000)
            time.sleep(0.1)

    def remove(self, name: str) -> None:
        """Removes a text, or all whose names begin with a name and a slash."""
        self._client.key_value_delete(f"tftpu/{name}")


class Watch:
    """Watches the other hosts, in threads, until this one leaves.

    Args:
        store: which all hosts see.
        index: of this host.
        count: of hosts.
        seconds: without a sign of life after which a host is lost.

    Attributes:
        store, index, count: the arguments.
    """

    def __init__(self, store: Store, index: int, count: int, seconds: float):
        self.store, self.index, self.count = store, index, count
        self._seconds = seconds
        now = time.monotonic()
        self._seen = {other: (now, "") for other in range(count) if other != index}
        self._answered = now  # when the store answered last
        self._working = 0  # blocks of `together`
        self._leaving = threading.Event()
        for name, target in (("beats", self._send_beats), ("lost-hosts", self._watch_hosts)):
            threading.Thread(target=target, name=name, daemon=True).start()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Counts a host that leaves within the block as lost: all are in it at the same time."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def leave(self, limit: float) -> bool:
        """Tells the others that this process ends; returns whether all of them do.

        Args:
            limit: seconds to wait for them.
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

    # In threads

    def _send_beats(self) -> None:
        beats = 0
        while not self._leaving.is_set():
            beats += 1
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_judge` counts the time
                self._exchange_texts(str(beats))
            self._leaving.wait(self._seconds / _BEATS)

    def _exchange_texts(self, own: str) -> None:
        """Shows this host's text, and reads those of the others."""
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
        """Returns a sentence about a host that shows no sign of life."""
        now = time.monotonic()
        if now - self._answered > self._seconds:
            return f"Host 0 was lost: it has not answered for {self._seconds:.0f} s."
        for other, (heard, text) in self._seen.items():
            if text != _LEFT and now - heard > self._seconds:
                return f"Host {other} was lost: no sign of life for {self._seconds:.0f} s."
        return None

    def _find_gone(self) -> str | None:
        """Returns a sentence about a host that ended while this one works with it."""
        for other, (heard, text) in self._seen.items():
            # Those that end together leave the block one after the other.
            if text == _LEFT and self._working and time.monotonic() - heard > self._seconds / 2:
                return f"Host {other} ended while this one was waiting for it: see its output."
        return None
