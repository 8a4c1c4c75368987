"""The exchange of examples between replicas."""

import numpy as np
import tensorflow as tf

import tftpu
from tftpu.engines.tensorflow.step.replicas import gather


def gather_shards(*shards):
    """Returns the first replica's result of gathering one shard from each replica."""
    strategy = tftpu.connect(virtual_devices=len(shards)).strategy
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(shards[context.replica_id_in_sync_group])
    )
    run = tf.function(lambda: strategy.run(lambda x: gather(x, len(shards)), args=(given,)))
    return strategy.experimental_local_results(run())[0].numpy()


def test_values_that_are_not_finite_stay_in_their_own_rows():
    first = np.array([[1.0, 2.0], [np.nan, -np.inf]], np.float32)
    second = np.array([[np.inf, 5.0], [6.0, 7.0]], np.float32)
    np.testing.assert_array_equal(gather_shards(first, second), np.concatenate([first, second]))


def test_small_integers_and_truth_values_keep_their_dtype():
    found = gather_shards(np.array([1, 255], np.uint8), np.array([0, 3], np.uint8))
    assert found.dtype == np.uint8
    assert found.tolist() == [1, 255, 0, 3]
    assert gather_shards(np.array([True]), np.array([False])).tolist() == [True, False]
