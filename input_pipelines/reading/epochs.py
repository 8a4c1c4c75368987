"""Training examples in memory: drawn by position (see `order`), gathered one batch at a time.

Starting at a step reads nothing that comes before it.
"""

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.reading import indexed
from tftpu.input_pipelines.tensors import Batch, Tensor


def compute_host_batch_size(global_batch_size: int, hosts: int) -> int:
    """Returns the number of examples of a global batch that each host reads.

    Raises:
        UserError: the number of hosts does not divide the global batch size.
    """
    if global_batch_size % hosts:
        raise UserError(
            f"A global batch of {global_batch_size} cannot be divided among {hosts} hosts."
        )
    return global_batch_size // hosts


@dataclasses.dataclass
class ArrayPipeline:
    """An endless, shuffled, batched dataset that can start at any step.

    Args:
        examples: nested NumPy arrays whose first dimension counts the examples. They are kept in
            host memory, and one gather makes a batch.
        global_batch_size: examples per step.
        seed: the seed of the order and the augmentation.
        prepare: a function that maps a batch of examples and seeds (batch, 2), int32, to a batch
            for the model. The seeds are random numbers that depend only on the run's seed, the
            epoch and the example.
        from_files: whether the examples come from files or a table, so that their hash detects
            changed data. Arrays that a program computes may differ in rounding in each run.
    """

    examples: Batch
    global_batch_size: int
    seed: int
    prepare: Callable[[Batch, Tensor], Batch]
    from_files: bool = False

    @property
    def count(self) -> int:
        """The number of examples of an epoch."""
        return len(tf.nest.flatten(self.examples)[0])

    def describe_files(self) -> dict[str, str]:
        """Returns a hash of the examples as {"content": hash}; {} unless `from_files`."""
        if not self.from_files:
            return {}
        found = hashlib.blake2b(digest_size=16)
        for array in tf.nest.flatten(self.examples):
            held = np.ascontiguousarray(array)
            found.update(repr((held.dtype.name, held.shape)).encode())
            if not held.dtype.hasobject:
                found.update(held.reshape(-1).view(np.uint8).data)
                continue
            for value in held.flat:  # texts, which the array only points to
                text = value if isinstance(value, bytes) else str(value)
                data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
                found.update(len(data).to_bytes(8, "little") + data)
        return {"content": found.hexdigest()}

    def starting_at(self, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
        """Returns endless global batches from a step on, or one host's shard of each.

        Args:
            step: the number of the first batch.
            host, hosts: index of this host, and number of hosts. The hosts' shards of a batch are
                equal in size and consecutive, in the order of the hosts.

        Raises:
            UserError: the number of hosts does not divide the global batch size.
        """
        share = compute_host_batch_size(self.global_batch_size, hosts)
        examples = tf.nest.map_structure(tf.constant, self.examples)
        places = tf.constant(np.arange(share) + host * share, tf.int64)

        def batch(step: Tensor) -> Batch:
            index, seeds = indexed.draw(
                self.count, self.seed, step * self.global_batch_size + places
            )
            chosen = tf.nest.map_structure(lambda array: tf.gather(array, index), examples)
            return self.prepare(chosen, seeds)

        return tf.data.Dataset.range(step, tf.int64.max).map(
            batch, num_parallel_calls=2, deterministic=True
        )
