"""tf.data service: other machines prepare the data of this one, in the same order.

    python -m tftpu.input_pipelines.service --port=5000 --host=10.0.0.3        # on each of them
    tftpu train ... --config.data.service=grpc://10.0.0.3:5000,grpc://10.0.0.4:5000

Machine m of M prepares the steps m, m + M, ...: it reads all records and decodes its own. Each is a
service of its own, a dispatcher with one worker, because several workers of one dispatcher give
their elements in no fixed order. This machine takes one step from each in turn, so the stream is
that of a run without a service, from any step on. If a machine dies the run stalls or stops; when
it is back, the same command goes on from the checkpoint.
"""

import argparse
import socket
import time
import uuid
from collections.abc import Callable

import tensorflow as tf

from tftpu.errors import UserError

PATIENCE = 30.0  # seconds for machines that start at the same time as this one

_service = tf.data.experimental.service


def distributed(
    steps: tf.data.Dataset, prepare: Callable, addresses: list[str], step: int
) -> tf.data.Dataset:
    """What `prepare` makes of a dataset of steps, made elsewhere, in order.

    Args:
        steps: endless, cheap to make.
        prepare: from such a dataset to one of as many elements, in order.
        addresses: of the services, as grpc://10.0.0.2:5000.
        step: the number of the first.

    Raises:
        UserError: an address at which nothing listens.
    """
    for address in addresses:
        _reach(address)
    numbers = tf.data.Dataset.range(step, tf.int64.max)
    made = []
    for machine, address in enumerate(addresses):
        mine = [part.shard(len(addresses), machine) for part in (numbers, steps)]
        # A name of its own: a run that goes on must not join, halfway, what it began before.
        job = _service.distribute(_service.ShardingPolicy.OFF, address, uuid.uuid4().hex)
        made.append(tf.data.Dataset.zip(mine[0], prepare(mine[1])).apply(job))
    turns = tf.data.Dataset.range(len(made)).repeat()

    def checked(expected: tf.Tensor, found: tuple):
        number, batch = found
        message = "A tf.data service gave another step than was due: run the same command again."
        with tf.control_dependencies([tf.debugging.assert_equal(number, expected, message)]):
            return tf.nest.map_structure(tf.identity, batch)

    in_turn = tf.data.Dataset.choose_from_datasets(made, turns, stop_on_empty_dataset=True)
    return tf.data.Dataset.zip(numbers, in_turn).map(lambda *parts: checked(*parts))


def _reach(address: str) -> None:
    """Raises `UserError` if nothing listens there: TensorFlow would wait for it without end."""
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
                    "mend data.service."
                ) from error
        time.sleep(0.5)


def serve(port: int = 0, host: str = "localhost") -> tuple:
    """Starts a service: a dispatcher and its worker, which live as long as they are held.

    Args:
        port: of the dispatcher; 0: one that is free. The worker takes one that is free.
        host: the name or address by which the training machine reaches this one.
    """
    dispatcher = _service.DispatchServer(_service.DispatcherConfig(port))
    own = dispatcher.target.removeprefix("grpc://")
    # %port% becomes the port that the worker was given.
    config = _service.WorkerConfig(own, worker_address=f"{host}:%port%")
    return dispatcher, _service.WorkerServer(config)


def main() -> None:
    """Runs a service until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--host", required=True, help="how the training machine reaches this one")
    flags = parser.parse_args()
    dispatcher, worker = serve(flags.port, flags.host)
    print(f"grpc://{flags.host}:{dispatcher.target.rpartition(':')[2]}", flush=True)
    worker.join()


if __name__ == "__main__":
    main()
