"""Running a `TrainStep` over given batches, as the trainer does, without the trainer."""

import tensorflow as tf

from tests.support.models.strategies import dataset
from tftpu.config import TrainConfig
from tftpu.engines.tensorflow.state import ModelState
from tftpu.engines.tensorflow.step.train_step import TrainStep


def train_step(model, spec, **options) -> TrainStep:
    """Returns the step of a compiled model, for the strategy in scope.

    Args:
        model: a compiled model.
        spec: of one replica's share.
        options: fields of `TrainConfig`.
    """
    return TrainStep(ModelState(model, spec, TrainConfig(**options)), spec)


def make_step(engine, model, batches, **options) -> TrainStep:
    """Returns the step of a compiled model for batches of (x, y, weight or None)."""
    spec = dataset(batches).element_spec
    share = spec[0].shape[0] // engine.data_shards
    spec = tuple(tf.TensorSpec((share, *s.shape[1:]), s.dtype) for s in spec)
    with engine.scope():
        return train_step(model, spec, **options)


def train(engine, step: TrainStep, batches) -> list[dict]:
    """Runs one device loop per batch; returns the results of each."""
    strategy = engine.strategy

    @tf.function
    def loop(iterator):
        function = tf.autograph.experimental.do_not_convert(step.train)
        strategy.run(function, args=(next(iterator),))
        strategy.run(step.synchronise)

    iterator = iter(strategy.experimental_distribute_dataset(dataset(batches)))
    results = []
    for _ in batches:
        loop(iterator)
        sums = step.accumulator.drain()
        results.append(step.sums.read(sums) | step.sums.read_gradients(sums))
    return results


def local_values(engine, variable) -> list:
    """Returns the copies of a variable, one per replica, as NumPy arrays."""
    return [v.numpy() for v in engine.strategy.experimental_local_results(variable.value)]
