"""A data service: other machines prepare the data for this one, in the same order.

    tftpu data serve photos.py --host=10.0.0.3 --port=5000 # on each of these machines
    tftpu train photos.py --config.data.service=10.0.0.3:5000,10.0.0.4:5000

For a run from step k on, machine m of M prepares the steps k + m, k + m + M, ...: it reads all
records and decodes those of its steps. The training machine takes one step from each in turn, so it
gets the same batches as without a service. If a machine dies, the run stops. Once the machine is
back, the same command resumes from the checkpoint.

TensorFlow has its own service. It listens on all interfaces of a machine, and runs any graph that
it is sent, which may read and write files. This service only sends batches of one data set, to
everybody who can connect. This module is the client, and `serving` is the server.

The protocol: the client sends a line of JSON with its request. The server answers with a line of
JSON with the shapes and dtypes of the parts of a batch, or with an error. Then it sends batches
without end, each with the byte `BATCH`, the number of its step and the bytes of its parts. If one
fails, the byte `ERROR` and a line of JSON with the error end the stream.
"""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tftpu.config import DataConfig, DataContext, operational_fields, to_plain
from tftpu.errors import UserError
from tftpu.input_pipelines.tensors import Spec
from tftpu.version import __version__

BATCH, ERROR = b"B", b"E"
LINE = 1 << 20  # maximum number of bytes in a line of JSON
PATIENCE = 30.0  # seconds to wait for machines that start at the same time as this one
STALLED = 600.0  # seconds without a byte after which a connection counts as stalled


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """The batches that one machine prepares.

    Attributes:
        version: the version of tftpu.
        data: the data set in the form of `config.json`, without fields that may differ between
            machines.
        seed: the seed of the order and the augmentation.
        step: the first step of the stream.
        host, hosts: index of the training host, and number of hosts that share a batch.
        machine, machines: index of the serving machine, and number of machines. It prepares the
            steps `step` + `machine`, then every `machines`-th one.
    """

    version: str
    data: dict[str, Any]
    seed: int
    step: int
    host: int
    hosts: int
    machine: int
    machines: int


def describe_data(data: DataConfig) -> dict[str, Any]:
    """Returns the fields of a data set that determine its batches."""
    left_out = operational_fields(data)
    return {key: value for key, value in to_plain(data).items() if key not in left_out}


def fetch_batches(
    data: DataConfig, addresses: list[str], context: DataContext, spec: Spec, step: int, host: int,
    hosts: int,
) -> tf.data.Dataset:  # fmt: skip
    """Returns the batches that services prepare, in order.

    Args:
        data: the data set.
        addresses: the addresses of the services, such as "10.0.0.2:5000".
        context: its seed is the seed of the order and the augmentation.
        spec: the spec of a batch.
        step: the number of the first batch.
        host, hosts: as for `Pipeline.starting_at`.

    Raises:
        UserError: no service listens at one of the addresses, it has another data set or version,
            or a batch has strings or no fixed shape.
    """
    parts = tf.nest.flatten(spec)
    made = []
    for machine, address in enumerate(addresses):
        wanted = BatchRequest(
            __version__,
            describe_data(data),
            context.seed,
            step,
            host,
            hosts,
            machine,
            len(addresses),
        )
        with _open_stream(address, wanted, parts):
            pass  # opens the stream to find mistakes before training
        batches = tf.data.Dataset.from_generator(
            lambda address=address, wanted=wanted: _receive_batches(address, wanted, parts),
            output_signature=tuple(parts),
        )
        made.append(batches.prefetch(2))
    turns = tf.data.Dataset.range(len(made)).repeat()
    in_turn = tf.data.Dataset.choose_from_datasets(made, turns, stop_on_empty_dataset=True)
    return in_turn.map(lambda *flat: tf.nest.pack_sequence_as(spec, flat))


def _receive_batches(
    address: str, wanted: BatchRequest, parts: list[Any]
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields the arrays of each batch that a machine prepares, in the order of `parts`."""
    number = wanted.step + wanted.machine
    try:
        with _open_stream(address, wanted, parts) as stream:
            while True:
                kind = _read_exactly(stream, 1)
                if kind == ERROR:
                    raise UserError(_read_line(stream)["error"])
                found = int.from_bytes(_read_exactly(stream, 8), "big")
                if kind != BATCH or found != number:
                    raise UserError(f"The data service at {address} sent the wrong batch.")
                yield tuple(_receive_part(stream, part) for part in parts)
                number += wanted.machines
    except OSError as error:
        raise UserError(
            f"The data service at {address} ended ({error or type(error).__name__}). Start it "
            "again, and run the same command to resume."
        ) from error


@contextlib.contextmanager
def _open_stream(address: str, wanted: BatchRequest, parts: list[Any]) -> Iterator[IO[bytes]]:
    """Opens a stream of batches; raises `UserError` if rejected, or if they differ from `parts`."""
    with _connect(address) as connection, connection.makefile("rb") as stream:
        connection.settimeout(STALLED)
        connection.sendall(json.dumps(dataclasses.asdict(wanted)).encode() + b"\n")
        answer = _read_line(stream)
        if "error" in answer:
            raise UserError(f"The data service at {address} rejects the request: {answer['error']}")
        if answer.get("parts") != describe_shapes(parts):
            raise UserError(
                f"The data service at {address} has batches of {answer.get('parts')}, but this "
                f"machine expects {describe_shapes(parts)}: start the service with the same "
                "config and files."
            )
        yield stream


def describe_shapes(parts: list[Any]) -> list[Any]:
    """Returns the shapes and dtypes of the parts of a batch, for JSON.

    Raises:
        UserError: a part has strings or no fixed shape.
    """
    for part in parts:
        if part.dtype == tf.string or not part.shape.is_fully_defined():
            raise UserError(
                f"A batch contains {part.dtype.name} {part.shape}, but data.service can send only "
                "numbers of fixed shapes: remove data.service."
            )
    return [[part.dtype.name, part.shape.as_list()] for part in parts]


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5.0)
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"There is no data service at {address} ({error}): start it there with "
                    f"`tftpu data serve … --port={port} --host={host}`, or correct "
                    "data.service."
                ) from error
        time.sleep(0.5)


def _read_line(stream: IO[bytes]) -> dict[str, Any]:
    line = stream.readline(LINE)
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("its answer is not from a data service") from error
    if not isinstance(answer, dict):
        raise ConnectionError("its answer is not from a data service")
    return answer


def _receive_part(stream: IO[bytes], part: Any) -> np.ndarray:
    dtype = np.dtype(part.dtype.as_numpy_dtype)
    size = int(np.prod(part.shape.as_list(), dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(_read_exactly(stream, size), dtype).reshape(part.shape.as_list())


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise ConnectionError("the connection was closed")
    return data
