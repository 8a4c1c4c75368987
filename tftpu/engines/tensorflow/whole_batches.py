"""Evaluation without padding, for losses and metrics that padding would change."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tftpu.engines.data.batches import build_finite_dataset, narrow, warn_if_endless
from tftpu.engines.data.streams import Stream, to_arrays
from tftpu.engines.data.tuning import limit_tuning
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.tensorflow import feed, internals
from tftpu.engines.tensorflow.step.eval_step import EvalStep
from tftpu.engines.tensorflow.step.loops import wrap_for_platform


class WholeBatches:
    """Evaluates batches without padding: in equal shards if possible, or whole on every replica.

    The last batch of a data set often cannot be divided equally. Every replica then computes the
    whole batch, and the sums are divided by the number of replicas.

    Args:
        strategy: the strategy whose replicas run the step.
        platform: the platform of the devices, "tpu"; None: GPUs or CPUs.
        step: the evaluation step.
    """

    def __init__(self, strategy: tf.distribute.Strategy, platform: str | None, step: EvalStep):
        self._strategy: Any = strategy
        replicas = strategy.num_replicas_in_sync
        shared = wrap_for_platform(platform, lambda shard: step.evaluate(shard, None, replicas))
        alike = wrap_for_platform(platform, lambda batch: step.evaluate(batch, None, 1, replicas))
        self._run_shared = self._compile_step(shared)
        self._run_alike = self._compile_step(alike)

    def run(self, dataset: Any, divides: bool = True) -> Iterator[None]:
        """Evaluates a finite data set; yields None after each batch.

        The sums are in the accumulator of the evaluation step.

        Args:
            dataset: a data set of batches.
            divides: whether to divide batches into shards if possible.
        """
        replicas = self._strategy.num_replicas_in_sync
        for batch in _iterate_batches(dataset):
            if not divides or count_examples(batch) % replicas:
                self._run_alike(batch)
            else:
                self._run_shared(feed.split_shards(batch, self._strategy))
            yield

    def _compile_step(self, step: Any) -> Any:
        # `strategy.run` gets the batch as one argument, because a batch may be a tuple.
        def run(batch):
            self._strategy.run(step, args=(batch,))

        return internals.build_graph_function(run)


def _iterate_batches(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Stream):
        return map(to_arrays, dataset.iterate())
    batches = narrow(build_finite_dataset(dataset))
    return warn_if_endless(_iterate_items(batches), int(batches.cardinality()), dataset=dataset)


def _iterate_items(batches: tf.data.Dataset) -> Iterator[Any]:
    # Unlike a `for` loop, this does not make TensorFlow log an end-of-data error to stderr.
    iterator = iter(limit_tuning(batches))
    while bool((item := iterator.get_next_as_optional()).has_value()):
        yield item.get_value()
