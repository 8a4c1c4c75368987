"""Evaluation without padding, for losses and metrics that would see it."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tftpu.engines.data.batches import build_finite_dataset, narrow, warn_if_endless
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.tensorflow.step.eval_step import EvalStep
from tftpu.engines.tensorflow.step.loops import wrap_for_platform


class WholeBatches:
    """Evaluates batches as they are: cut into equal shards, or else whole on every replica.

    The last batch of a data set often cannot be cut. Every replica then computes all of it, and
    the sums are divided by the number of replicas.

    Args:
        strategy: runs the step on its replicas.
        platform: as `tftpu.sharding` names it.
        step: the evaluation step.
    """

    def __init__(self, strategy: tf.distribute.Strategy, platform: str | None, step: EvalStep):
        self._strategy: Any = strategy
        replicas = strategy.num_replicas_in_sync
        shared = wrap_for_platform(platform, lambda shard: step.evaluate(shard, None, replicas))
        alike = wrap_for_platform(platform, lambda batch: step.evaluate(batch, None, 1, replicas))
        self._run_shared = self._compile_step(shared)
        self._run_alike = self._compile_step(alike)

    def run(self, dataset: Any, divides: bool = True) -> None:
        """Runs over a finite data set once; the step's accumulator adds up.

        Args:
            dataset: of batches.
            divides: whether batches are cut into shards where they can be.
        """
        replicas = self._strategy.num_replicas_in_sync
        batches = narrow(build_finite_dataset(dataset))
        for batch in warn_if_endless(
            _iterate_items(batches), int(batches.cardinality()), dataset=dataset
        ):
            if not divides or count_examples(batch) % replicas:
                self._run_alike(batch)
            else:
                self._run_shared(self._split_shards(batch, count_examples(batch) // replicas))

    def _compile_step(self, step: Any) -> Any:
        # A batch may be a tuple: `strategy.run` gets it as one argument.
        def run(batch):
            self._strategy.run(step, args=(batch,))

        return tf.function(run, autograph=False)

    def _split_shards(self, batch: Any, size: int) -> Any:
        """Returns a batch cut into consecutive shards, one for each replica."""
        if self._strategy.num_replicas_in_sync == 1:
            return batch

        def slice_shard(context: Any) -> Any:
            first = context.replica_id_in_sync_group * size
            return keras.tree.map_structure(lambda t: t[first : first + size], batch)

        return self._strategy.experimental_distribute_values_from_function(slice_shard)


def _iterate_items(batches: tf.data.Dataset) -> Iterator[Any]:
    # A plain `for` loop makes TensorFlow write about the end of the data to stderr.
    iterator = iter(batches)
    while bool((item := iterator.get_next_as_optional()).has_value()):
        yield item.get_value()
