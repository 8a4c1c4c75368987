"""Rejects requests that a foreign web page may have sent through a browser in this network.

A page of any site can send requests to this machine. The browser states the page (`Origin`) and the
name of the server (`Host`), which may be a foreign name whose owner lets it point to this machine.
A page may declare a body as JSON only after asking for permission, which the server never gives
(https://fetch.spec.whatwg.org/#cors-safelisted-request-header).
"""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tftpu.inference.server.answering import as_error

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY = "*"


def list_own_hosts(host: str) -> tuple[str, ...]:
    """Returns the names by which requests may call a server.

    Args:
        host: the name or address at which it listens. 0.0.0.0 and :: also allow all addresses and
            the name of this machine.
    """
    everywhere = _is_address(host) and ipaddress.ip_address(host).is_unspecified
    return (*LOOPBACK, host, *([socket.gethostname()] if everywhere else []))


class OwnHosts:
    """An ASGI application that only answers to its own names, and not to foreign pages.

    Args:
        app: the app to protect.
        hosts: the allowed names, such as "localhost", "*.example.com" for all subdomains, or "*"
            for any name. The addresses 0.0.0.0 and :: allow any address as a host: an attack needs
            a name that its owner points to this machine.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]):
        self._app = app
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._addresses = bool(self._hosts & {"0.0.0.0", "::"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or rejects a request."""
        refused = self._find_refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await as_error(refused, 403, scope["path"])(scope, receive, send)

    def _find_refusal(self, headers: Headers) -> str | None:
        """Returns why a request is rejected, or None; browsers always send a `Host` header."""
        origin = headers.get("origin")
        host = _parse_host(f"//{headers['host']}") if "host" in headers else None
        if host is not None and not self._is_answered(host, self._addresses):
            return (
                f"This server does not answer to the host {headers['host'][:80]!r}: to allow "
                "it, start the server with --allow_hosts=NAME."
            )
        if origin is None or _parse_host(origin) == host or self._is_answered(_parse_host(origin)):
            return None
        return (
            f"This server does not answer to pages of {origin[:80]!r}: to allow them, start the "
            "server with --allow_hosts=NAME."
        )

    def _is_answered(self, name: str, addresses: bool = False) -> bool:
        above = name.split(".")
        known = {name, ANY, *(".".join(["*", *above[n:]]) for n in range(1, len(above)))}
        return bool(known & self._hosts) or (addresses and _is_address(name))


def _parse_host(address: str) -> str:
    """Returns the host of an address, in lower case, or "" if there is none."""
    try:
        return (urlsplit(address).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
