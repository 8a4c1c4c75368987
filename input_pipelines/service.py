"""tf.data service: other machines prepare the data of this one, in the same order.

    python -m tftpu.input_pipelines.service --port=5000 --workers=10.0.0.3:5001,10.0.0.4:5001
    python -m tftpu.input_pipelines.service --address=10.0.0.3:5001 --dispatcher=10.0.0.2:5000

Worker w of W prepares the steps w, w + W, ... (static sharding, so the dispatcher has to know the
workers; each reads all records, and prepares its own). This machine takes one step from each worker
in turn and puts each round in order. So the stream is that of a run without the service, from any
step on. A worker that dies stalls the run until it is back; then it begins anew, which is seen, and
the run stops with an error: given again, it goes on from its checkpoint.
"""

import argparse
import uuid

import tensorflow as tf

HINT = tf.data.experimental.SHARD_HINT
_service = tf.data.experimental.service


def sharded(steps: tf.data.Dataset) -> tf.data.Dataset:
    """Of a dataset of steps those that a worker prepares."""
    return steps.shard(HINT, HINT)


def collected(batches: tf.data.Dataset, step: int, address: str, workers: int) -> tf.data.Dataset:
    """All steps, in order, of a dataset that each worker makes a part of.

    Args:
        batches: made of `sharded` steps.
        step: the first.
        address: of the dispatcher, as grpc://10.0.0.2:5000.
        workers: how many the dispatcher has been told of.
    """
    numbered = tf.data.Dataset.zip(sharded(tf.data.Dataset.range(step, tf.int64.max)), batches)
    # A name of its own: another run, or this one when it goes on, must not join halfway.
    rounds = numbered.apply(
        _service.distribute(
            _service.ShardingPolicy.HINT,
            address,
            job_name=uuid.uuid4().hex,
            consumer_index=0,
            num_consumers=1,
        )
    ).batch(workers, drop_remainder=True)

    def ordered(number: tf.Tensor, steps: tf.Tensor, batch) -> tuple:
        expected = step + number * workers + tf.range(workers, dtype=tf.int64)
        order = tf.argsort(steps)
        message = (
            "The workers of the tf.data service gave other steps than were due: was one started "
            f"anew, or are they not {workers}? Start the run again."
        )
        tf.debugging.assert_equal(tf.gather(steps, order), expected, message)
        return tf.nest.map_structure(lambda part: tf.gather(part, order), batch)

    numbers = tf.data.Dataset.range(tf.int64.max)
    return tf.data.Dataset.zip(numbers, rounds).map(lambda n, r: ordered(n, *r)).unbatch()


def dispatcher(port: int, workers: list[str]):
    """Starts a dispatcher for workers at these addresses, HOST:PORT each; `.target` is its own."""
    return _service.DispatchServer(_service.DispatcherConfig(port, worker_addresses=workers))


def worker(address: str, dispatcher: str):
    """Starts a worker that is reached at an address, HOST:PORT, for a dispatcher at another."""
    port = int(address.rpartition(":")[2])
    return _service.WorkerServer(_service.WorkerConfig(dispatcher, address, port=port))


def main() -> None:
    """Runs a dispatcher or a worker until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=5000, help="of the dispatcher")
    parser.add_argument("--workers", help="of the dispatcher: HOST:PORT,HOST:PORT")
    parser.add_argument("--address", help="of this worker: HOST:PORT")
    parser.add_argument("--dispatcher", help="of this worker: HOST:PORT")
    flags = parser.parse_args()
    if bool(flags.workers) == bool(flags.address and flags.dispatcher):
        parser.error("give --workers for a dispatcher, or --address and --dispatcher for a worker")
    if flags.workers:
        server = dispatcher(flags.port, flags.workers.split(","))
    else:
        server = worker(flags.address, flags.dispatcher)
    server.join()


if __name__ == "__main__":
    main()
