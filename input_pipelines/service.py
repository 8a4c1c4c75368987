"""tf.data service: other machines prepare the data for this one, in the same order.

    python -m tftpu.input_pipelines.service --port=5000 --host=10.0.0.3        # on each of them
    tftpu train ... --config.data.service=grpc://10.0.0.3:5000,grpc://10.0.0.4:5000

Machine m of M prepares the steps m, m + M, ...: it reads all records and decodes its own. Each
machine is a separate service, a dispatcher with one worker, because the elements of several
workers of one dispatcher arrive in no fixed order. The training machine takes one step from each in
turn, so the stream is that of a run without a service, from any step on. If a machine dies, the
run stalls or stops; once it is back, the same command resumes from the checkpoint.
"""

import argparse
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.tensors import Batch, Tensor

PATIENCE = 30.0  # seconds to wait for machines that start at the same time as this one

_service: Any = tf.data.experimental.service


def distributed(
    steps: tf.data.Dataset,
    prepare: Callable[[tf.data.Dataset], tf.data.Dataset],
    addresses: list[str],
    step: int,
) -> tf.data.Dataset:
    """Returns `prepare(steps)`, computed by services, in order.

    Args:
        steps: an endless dataset that is cheap to make.
        prepare: maps such a dataset to one with an element for each of its elements, in order.
        addresses: of the services, such as grpc://10.0.0.2:5000.
        step: the number of the first element.

    Raises:
        UserError: nothing listens at one of the addresses.
    """
    for address in addresses:
        _reach(address)
    numbers = tf.data.Dataset.range(step, tf.int64.max)
    made = []
    for machine, address in enumerate(addresses):
        mine = [part.shard(len(addresses), machine) for part in (numbers, steps)]
        # A unique name: a resumed run must not join a job that it began before it stopped.
        job = _service.distribute(_service.ShardingPolicy.OFF, address, uuid.uuid4().hex)
        made.append(tf.data.Dataset.zip(mine[0], prepare(mine[1])).apply(job))
    turns = tf.data.Dataset.range(len(made)).repeat()

    def checked(expected: Tensor, found: tuple[Tensor, Batch]) -> Batch:
        number, batch = found
        message = "A tf.data service sent the wrong step: run the same command again."
        with tf.control_dependencies([tf.debugging.assert_equal(number, expected, message)]):
            return tf.nest.map_structure(tf.identity, batch)

    in_turn = tf.data.Dataset.choose_from_datasets(made, turns, stop_on_empty_dataset=True)
    return tf.data.Dataset.zip(numbers, in_turn).map(lambda *parts: checked(*parts))


def _reach(address: str) -> None:
    """Raises `UserError` if nothing listens at an address: TensorFlow would wait forever."""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    end = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"There is no tf.data service at {address} ({error}): start it there with "
                    f"`python -m tftpu.input_pipelines.service --port={port} --host={host}`, or "
                    "correct data.service."
                ) from error
        time.sleep(0.5)


def serve(port: int = 0, host: str = "localhost") -> tuple[Any, Any]:
    """Starts a service.

    Args:
        port: of the dispatcher; 0: any free one. The worker takes any free one.
        host: the name or address by which the training machine reaches this one.

    Returns:
        The dispatcher and its worker, which stop when garbage-collected.
    """
    dispatcher = _service.DispatchServer(_service.DispatcherConfig(port))
    own = dispatcher.target.removeprefix("grpc://")
    # TensorFlow replaces %port% with the port of the worker.
    config = _service.WorkerConfig(own, worker_address=f"{host}:%port%")
    return dispatcher, _service.WorkerServer(config)


def main() -> None:
    """Runs a service until it is stopped."""
    parser = argparse.ArgumentParser(
        description="Prepares the data of a training machine on this one."
    )
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--host", required=True, help="how the training machine reaches this one")
    flags = parser.parse_args()
    dispatcher, worker = serve(flags.port, flags.host)
    print(f"grpc://{flags.host}:{dispatcher.target.rpartition(':')[2]}", flush=True)
    worker.join()


if __name__ == "__main__":
    main()
