"""The padded batches of an evaluation, and their spec without tracing."""

import numpy as np
import pytest
import tensorflow as tf

from tftpu.engines.data.arrays import as_arrays
from tftpu.engines.data.conversion import build_evaluation, build_evaluation_spec

X = np.arange(20.0).reshape(10, 2)  # float64, which becomes float32


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "data",
    [
        X,
        (X,),
        ((X, X),),
        (X, np.arange(10)),
        ({"a": X, "b": np.arange(10)}, np.arange(10), np.ones(10, np.float32)),
    ],
    ids=["array", "tuple of one", "tuple of two in one", "labels", "names and weights"],
)
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_the_spec_of_an_evaluation_is_that_of_its_batches(data, replicas, drop_remainder):
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(4, drop_remainder)
    batches = build_evaluation(dataset, replicas)
    spec, valid = batches.element_spec
    assert build_evaluation_spec(dataset, replicas) == spec
    assert sum(int(mask.numpy().sum()) for _, mask in batches) == (8 if drop_remainder else 10)
    assert valid.shape[0] % replicas == 0


def test_the_spec_of_arrays_is_that_of_their_batches():
    arrays = as_arrays(X, np.arange(10), batch_size=4)
    assert build_evaluation_spec(arrays, 8) == build_evaluation(arrays, 8).element_spec[0]
