"""The hosts of a TensorFlow strategy, which train together."""

import contextlib
from typing import Any

import tensorflow as tf

from tftpu.runtime import hosts


class StrategyHosts:
    """The hosts of a strategy; see `tftpu.engines.engine.Hosts`.

    On a TPU slice, one process drives all hosts, so they count as one.
    """

    exchange = None  # the chief has all values and writes them, so hosts exchange nothing

    def __init__(self, strategy: tf.distribute.Strategy):
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        place = hosts.read_task() if several else hosts.Task()
        self.index, self.count, self.chief = place.index, place.count, place.chief
        self._strategy: Any = strategy
        replicas = strategy.num_replicas_in_sync // self.count

        def add(value):
            context: Any = tf.distribute.get_replica_context()
            here = tf.identity(value)  # `all_reduce` needs the value on the replica's device
            return context.all_reduce(tf.distribute.ReduceOp.SUM, here) // replicas

        self._add = tf.function(lambda value: self._strategy.run(add, args=(value,)))

    def any(self, *flags: bool) -> list[bool]:
        """Returns, for each flag, whether it is set on any host."""
        base = self.count + 1
        total = self._sum_over_hosts(sum(int(flag) * base**i for i, flag in enumerate(flags)))
        return [total // base**i % base > 0 for i in range(len(flags))]

    def from_chief(self, step: int | None) -> int | None:
        """Returns the step, or None, that the chief passes, on all hosts (a barrier)."""
        mine = step if step is not None else -1
        total = self._sum_over_hosts(mine if self.chief else 0)
        return total if total >= 0 else None

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context without effect: TensorFlow itself notices lost hosts."""
        return contextlib.nullcontext()

    def _sum_over_hosts(self, value: int) -> int:
        """Returns the sum of all hosts' values (a barrier)."""
        if self.count == 1:
            return value
        total = self._add(tf.constant(value, tf.int64))
        return int(self._strategy.experimental_local_results(total)[0])


def count_input_hosts(strategy: Any) -> int:
    """Returns the number of hosts with input pipelines, each of which feeds its replicas."""
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return strategy.extended.num_hosts
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return hosts.read_task().count
    return 1


def is_read_remotely(strategy: Any) -> bool:
    """Returns whether another machine reads the data, as with a TPU that is given by name."""
    if not isinstance(strategy, tf.distribute.TPUStrategy):
        return False
    return not all("job:localhost" in device for device in strategy.extended.worker_devices)
