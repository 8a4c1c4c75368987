"""The server that prepares data for a training machine; see `service`.

Everybody who reaches the port can read batches of the data set and keep the machine busy, because
there are no passwords and no encryption. So a server listens only at one private address. A flag
allows a public address, or all addresses.
"""

import contextlib
import dataclasses
import ipaddress
import json
import logging
import socket
import socketserver
from typing import Any, cast

import tensorflow as tf

from tftpu.config import DataConfig, DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.pipeline import Pipeline
from tftpu.input_pipelines.service import (
    BATCH,
    ERROR,
    LINE,
    BatchRequest,
    describe_data,
    describe_shapes,
)
from tftpu.version import __version__

ASKING = 30.0  # seconds in which a client must send its request

_log = logging.getLogger(__name__)


class Server(socketserver.ThreadingTCPServer):
    """A server of one data set.

    Args:
        data: the data set.
        host: the name or the address to listen at.
        port: the port; 0: any free port.
        allow_network: whether a public address, or all addresses, are allowed.

    Raises:
        UserError: the address is public, or cannot be listened at.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, data: DataConfig, host: str, port: int, allow_network: bool = False):
        self.data = dataclasses.replace(data, service="")  # this machine prepares the data itself
        family, address = _resolve_host(host, port)
        if not allow_network:
            _check_private(host, address[0])
        self.address_family = family
        try:
            super().__init__(address, _ConnectionHandler)
        except OSError as error:
            raise UserError(f"Cannot listen at {host}:{port}: {error.strerror}.") from error

    @property
    def port(self) -> int:
        """The port at which the server listens."""
        return self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.warning("A client at %s failed.", client_address[0], exc_info=True)


class _ConnectionHandler(socketserver.StreamRequestHandler):
    """A connection of a training machine."""

    timeout = ASKING

    @property
    def _data(self) -> DataConfig:
        return cast("Server", self.server).data

    def handle(self) -> None:
        try:
            wanted = _parse_request(self.rfile.readline(LINE))
        except OSError:
            return None  # the client sent no request
        except UserError as error:
            return self._send_line(b"", {"error": str(error)})
        try:
            batches = self._iterate_batches(wanted)
            answer = {"parts": describe_shapes(tf.nest.flatten(batches.element_spec))}
        except (UserError, OSError, tf.errors.OpError) as error:
            return self._send_line(b"", {"error": _extract_first_line(error)})
        self.connection.settimeout(None)  # a training machine may pause for any time
        number = wanted.step + wanted.machine
        try:
            self._send_line(b"", answer)
            for batch in batches:
                self.wfile.write(BATCH + number.to_bytes(8, "big"))
                for part in tf.nest.flatten(batch):
                    self.wfile.write(part.numpy().tobytes())
                number += wanted.machines
        except OSError:
            return None  # the training machine has disconnected
        except (UserError, tf.errors.OpError) as error:
            self._send_line(ERROR, {"error": _extract_first_line(error)})

    def _iterate_batches(self, wanted: BatchRequest) -> tf.data.Dataset:
        """Returns the batches that a client requests.

        Raises:
            UserError: the request is for another data set or version, or the data cannot be served.
        """
        if wanted.version != __version__:
            raise UserError(
                f"the service has tftpu {__version__}, and the training machine has "
                f"{wanted.version}: install the same version."
            )
        here = describe_data(self._data)
        for key in sorted({*here, *wanted.data}):
            if here.get(key) != wanted.data.get(key):
                raise UserError(
                    f"data.{key} is {here.get(key)!r} for the service and {wanted.data.get(key)!r} "
                    "on the training machine: start both with the same config."
                )
        context = DataContext(wanted.seed, self._data.global_batch_size)
        pipeline = self._data.training(context)
        if not isinstance(pipeline, Pipeline):
            raise UserError(
                f"{type(self._data).__name__} cannot be served: data.service works only with "
                "sources that are read during training."
            )
        return pipeline.starting_at(
            wanted.step, wanted.host, wanted.hosts, wanted.machine, wanted.machines
        )

    def _send_line(self, kind: bytes, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the training machine may have disconnected
            self.wfile.write(kind + json.dumps(answer).encode() + b"\n")


def _parse_request(line: bytes) -> BatchRequest:
    """Parses a client's first line; raises `UserError` if it is not a valid request."""
    try:
        wanted = BatchRequest(**json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            "this is a data service of tftpu, but the request is for something else."
        ) from error
    numbers = (wanted.seed, wanted.step, wanted.host, wanted.hosts, wanted.machine, wanted.machines)
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise UserError(f"the numbers {numbers} cannot belong to a run.")
    if not isinstance(wanted.data, dict) or not wanted.host < wanted.hosts:
        raise UserError("this is a data service of tftpu, but the request is for something else.")
    if not wanted.machine < wanted.machines:
        raise UserError(f"there is no machine {wanted.machine} of {wanted.machines}.")
    return wanted


def _resolve_host(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UserError(
            f"--host={host} is not an address of this machine ({error}): give the address at "
            "which the training machine reaches it."
        ) from error
    return found[0][0], found[0][4]


def _check_private(host: str, address: str) -> None:
    """Raises `UserError` for an address that other people's machines may reach."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.is_loopback or (found.is_private and not found.is_unspecified):
        return
    what = "all addresses of this machine" if found.is_unspecified else "a public address"
    raise UserError(
        f"--host={host} means {what}. Everybody who reaches the port can read the training data "
        "without a password, and keep this machine busy. Give a private address of this machine, "
        "such as 10.0.0.3, or add --allow_network if a firewall admits only your training "
        "machines."
    )


def _extract_first_line(error: Exception) -> str:
    text = getattr(error, "message", None) or str(error)
    return text.split("\nTraceback")[0].strip().removeprefix("UserError: ").splitlines()[0]
