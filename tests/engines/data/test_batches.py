"""Sample weights from class weights."""

import numpy as np
import pytest
import tensorflow as tf

from tftpu.engines.data.batches import weigh


@pytest.mark.parametrize(
    ("labels", "weights"),
    [
        ([0.05, 0.95, 0.05], [2.0, 5.0, 2.0]),  # smoothed
        ([[0.95], [-0.2], [1.6]], [5.0, 2.0, 1.0]),
        ([True, False, True], [5.0, 2.0, 5.0]),
        (np.array([1, 255, 0], np.uint8), [5.0, 1.0, 2.0]),
    ],
    ids=str,
)
def test_class_weights_go_to_the_nearest_label_as_in_keras(labels, weights):
    *_, found = weigh((tf.zeros((3, 2)), tf.constant(labels)), {0: 2.0, 1: 5.0})
    assert found.numpy().tolist() == weights
