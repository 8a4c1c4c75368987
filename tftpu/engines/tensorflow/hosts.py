"""The hosts of a strategy, which agree on flags and steps through its own collectives."""

import tensorflow as tf

from tftpu.runtime.hosts import Task, task


class Hosts:
    """The processes of a strategy; all of them call its methods in the same order.

    Attributes:
        index: the place of this process; 0 is the chief.
        count: the number of processes.
        chief: whether this process writes what is written once.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        place = task() if several else Task()
        self.index, self.count, self.chief = place.index, place.count, place.chief
        self._strategy = strategy
        replicas = strategy.num_replicas_in_sync // self.count

        def add(value):
            context = tf.distribute.get_replica_context()
            here = tf.identity(value)  # on the replica's device, as the sum requires
            return context.all_reduce(tf.distribute.ReduceOp.SUM, here) // replicas

        self._add = tf.function(lambda value: strategy.run(add, args=(value,)))

    def any(self, *flags: bool) -> list[bool]:
        """Returns, for each flag, whether it is set on any host."""
        base = self.count + 1
        total = self._total(sum(int(flag) * base**i for i, flag in enumerate(flags)))
        return [total // base**i % base > 0 for i in range(len(flags))]

    def from_chief(self, step: int | None) -> int | None:
        """Broadcasts the chief's step, or None, to all hosts (a barrier)."""
        mine = step if step is not None else -1
        total = self._total(mine if self.chief else 0)
        return total if total >= 0 else None

    def _total(self, value: int) -> int:
        """Returns the sum over all hosts, which wait for one another."""
        if self.count == 1:
            return value
        total = self._add(tf.constant(value, tf.int64))
        return int(self._strategy.experimental_local_results(total)[0])


def input_hosts(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of hosts that feed the replicas, each with its own input pipeline."""
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return strategy.extended.num_hosts
    return Hosts(strategy).count
