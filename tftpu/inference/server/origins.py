"""Refuses requests that web pages of others may have sent, by way of a browser of this network.

A page of any site can send requests to this machine. The browser says which page it was (`Origin`),
and which name led here (`Host`): a foreign one, where its owner lets it point to this machine. That
a body is JSON, a page can only say after asking, and the server allows nobody
(https://fetch.spec.whatwg.org/#cors-safelisted-request-header).
"""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tftpu.inference.server import payloads
from tftpu.inference.server.answering import as_json

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY = "*"


def list_own_hosts(host: str) -> tuple[str, ...]:
    """Returns the names by which requests may call a server.

    Args:
        host: name or address that it listens at; at all addresses, it answers to any of them.
    """
    everywhere = _is_address(host) and ipaddress.ip_address(host).is_unspecified
    return (*LOOPBACK, host, *([socket.gethostname()] if everywhere else []))


class OwnHosts:
    """An application of ASGI that answers to its own names alone, and to no page of others.

    Args:
        app: to protect.
        hosts: names, such as "localhost", "*.example.com" for all below it, or "*" for any. The
            addresses 0.0.0.0 and :: stand for any address: no owner of a name can point it there.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]):
        self._app = app
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._addresses = bool(self._hosts & {"0.0.0.0", "::"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it."""
        refused = self._find_refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await as_json(payloads.format_error(refused), 403)(scope, receive, send)

    def _find_refusal(self, headers: Headers) -> str | None:
        """Returns why a request is refused; None if it is not. Only programs send no host."""
        origin = headers.get("origin")
        host = _parse_host(f"//{headers['host']}") if "host" in headers else None
        if host is not None and not self._is_answered(host, self._addresses):
            return (
                f"This server does not answer to the host {headers['host'][:80]!r}: should it, "
                "start it with --allow_hosts=NAME."
            )
        if origin is None or _parse_host(origin) == host or self._is_answered(_parse_host(origin)):
            return None
        return (
            f"This server does not answer to pages of {origin[:80]!r}: should it, start it with "
            "--allow_hosts=NAME."
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
