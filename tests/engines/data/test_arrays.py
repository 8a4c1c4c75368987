"""Arrays in memory as batches: their order, epochs, and the parts of hosts."""

import numpy as np
import pytest

from tftpu.engines.data.arrays import as_arrays
from tftpu.errors import UserError


def test_each_epoch_is_another_order_of_all_examples():
    arrays = as_arrays(np.arange(50)[:, None], batch_size=16, shuffle=True, seed=3)
    stream = [batch[:, 0] for batch in arrays.from_step(0).take(8).as_numpy_iterator()]
    assert [len(batch) for batch in stream] == [16, 16, 16, 2] * 2
    first, second = np.concatenate(stream[:4]), np.concatenate(stream[4:])
    assert sorted(first) == sorted(second) == list(range(50))
    assert (first != second).any() and (first != np.arange(50)).any()
    complete = [batch[:, 0] for batch in arrays.starting_at(0).take(6).as_numpy_iterator()]
    np.testing.assert_array_equal(np.concatenate(complete), [*first, *second][:96])
    halves = [next(iter(arrays.starting_at(2, host, 2))) for host in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves)[:, 0], complete[2])


def test_a_batch_that_hosts_cannot_share_fails():
    with pytest.raises(UserError, match="global batch of 15 cannot be divided among 2 hosts"):
        as_arrays(np.zeros((30, 1)), batch_size=15).starting_at(0, 0, 2)


def test_parts_keep_their_structure():
    given = {"a": np.zeros((4, 2)), "b": [np.zeros(4), np.ones(4)]}
    (batch,) = as_arrays(given, np.arange(4), batch_size=4).iterate_once()
    x, y = batch
    assert x["a"].shape == (4, 2) and isinstance(x["b"], tuple)
    assert y.numpy().tolist() == [0, 1, 2, 3]
