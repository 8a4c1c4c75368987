"""Running a `Step` over given batches, as the trainer does, without the trainer."""

import tensorflow as tf

from tests.support.strategies import dataset
from tftpu.engines.tensorflow.step import Step


def make_step(strategy, model, batches, **options) -> Step:
    """The step of a compiled model for batches of (x, y, weight or None)."""
    spec = dataset(batches).element_spec
    share = spec[0].shape[0] // strategy.num_replicas_in_sync
    spec = tuple(tf.TensorSpec((share, *s.shape[1:]), s.dtype) for s in spec)
    with strategy.scope():
        return Step(model, spec, **options)


def train(strategy, step: Step, batches) -> list[dict]:
    """One device loop a batch; the results of each."""

    @tf.function
    def loop(iterator):
        function = tf.autograph.experimental.do_not_convert(step.train)
        strategy.run(function, args=(next(iterator),))
        strategy.run(step.synchronise)

    iterator = iter(strategy.experimental_distribute_dataset(dataset(batches)))
    results = []
    for _ in batches:
        loop(iterator)
        results.append(step.train_totals.read(step.train_totals.drain()))
    return results


def local_values(strategy, variable) -> list:
    """The copies of a variable, one a replica, as NumPy arrays."""
    return [v.numpy() for v in strategy.experimental_local_results(variable.value)]
