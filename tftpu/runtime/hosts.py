"""Several processes that train together, one a host: who writes, and what all agree on.

TF_CONFIG says who they are, as for TensorFlow's own multi-worker strategy:
https://www.tensorflow.org/guide/distributed_training. On a TPU slice one process drives all hosts.
"""

import json
import os
from typing import TYPE_CHECKING, NamedTuple

from tftpu.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf


class Task(NamedTuple):
    """The place of this process among those that train together."""

    index: int = 0  # the first is the chief, who writes what is written once
    count: int = 1

    @property
    def chief(self) -> bool:
        return self.index == 0


def task() -> Task:
    """The place of this process, by TF_CONFIG; alone, if that is not set.

    Raises:
        UserError: TF_CONFIG cannot be read, or names something other than workers.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return Task()
    shape = '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = json.loads(text)
        cluster = {kind: list(hosts) for kind, hosts in config.get("cluster", {}).items()}
        chiefs, workers = (cluster.pop(kind, []) for kind in ("chief", "worker"))
        count = len(chiefs) + len(workers)
        if count < 2 and not cluster:  # cloud services set it for a single machine, too
            return Task()
        kind, index = config["task"]["type"], int(config["task"]["index"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"TF_CONFIG cannot be read ({error!r}): it must be {shape}.") from error
    if cluster or kind not in ("chief", "worker") or (kind == "worker" and index >= len(workers)):
        other = ", ".join([*cluster, f"the task {kind} {index}"])
        raise UserError(
            f"TF_CONFIG has {other}: all processes train, as a chief or workers of the cluster. "
            f"It must be {shape}."
        )
    return Task(index + (len(chiefs) if kind == "worker" else 0), count)


class Hosts:
    """The processes of a strategy, which all call the methods below in the same order."""

    def __init__(self, strategy: "tf.distribute.Strategy"):
        import tensorflow as tf

        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.index, self.count = task() if several else Task()
        self.chief = self.index == 0
        self._strategy = strategy
        self._add = None

    def any(self, *flags: bool) -> list[bool]:
        """Whether a flag is set on any host, for each."""
        base = self.count + 1
        total = self._total(sum(int(flag) * base**i for i, flag in enumerate(flags)))
        return [total // base**i % base > 0 for i in range(len(flags))]

    def from_chief(self, step: int | None) -> int | None:
        """What the chief has in hand, on all hosts, when all have come here."""
        mine = step if step is not None else -1
        total = self._total(mine if self.chief else 0)
        return total if total >= 0 else None

    def _total(self, value: int) -> int:
        """The sum over all hosts, which wait for one another."""
        if self.count == 1:
            return value
        import tensorflow as tf

        if self._add is None:
            replicas = self._strategy.num_replicas_in_sync // self.count

            def add(value):
                context = tf.distribute.get_replica_context()
                here = tf.identity(value)  # on the replica's device, which the sum asks for
                return context.all_reduce(tf.distribute.ReduceOp.SUM, here) // replicas

            self._add = tf.function(lambda value: self._strategy.run(add, args=(value,)))
        total = self._add(tf.constant(value, tf.int64))
        return int(self._strategy.experimental_local_results(total)[0])


def input_hosts(strategy: "tf.distribute.Strategy") -> int:
    """How many hosts feed the replicas, each with an input pipeline of its own."""
    import tensorflow as tf

    if isinstance(strategy, tf.distribute.TPUStrategy):
        return strategy.extended.num_hosts
    return Hosts(strategy).count
