"""A `keras.utils.PyDataset` as batches: order, epochs, workers."""

import itertools

import numpy as np
import pytest

from tests.support.data.py_batches import Batches
from tests.support.models.training import examples
from tftpu.engines.data.batches import data_errors
from tftpu.engines.data.py_dataset import PyBatches
from tftpu.errors import UserError


def features(batches: PyBatches, step: int, count: int) -> list[np.ndarray]:
    """Returns the features of batches from a step on."""
    stream = batches.from_step(step).as_numpy_iterator()
    return [x for x, _ in itertools.islice(stream, count)]


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_come_in_order_epoch_by_epoch(workers):
    dataset = Batches(40, 12, workers=workers, max_queue_size=2)
    found = features(PyBatches(dataset), 0, 9)
    assert [len(x) for x in found] == [12, 12, 12, 4, 12, 12, 12, 4, 12]
    np.testing.assert_array_equal(np.concatenate(found[:4]), examples(40)[0])


def test_each_epoch_shuffles_the_batches_and_can_start_at_any_step():
    batches = PyBatches(Batches(100, 12), shuffle=True, seed=2)
    found = features(batches, 0, 18)
    assert [len(x) for x in found] == [*[12] * 8, 4] * 2
    first, second = (np.concatenate(found[start : start + 9]) for start in (0, 9))
    assert (first != second).any()
    np.testing.assert_array_equal(np.sort(first, 0), np.sort(examples(100)[0], 0))
    for a, b in zip(features(batches, 13, 5), found[13:]):
        np.testing.assert_array_equal(a, b)


class Endless(Batches):
    num_batches = None

    def __getitem__(self, index):
        return super().__getitem__(index % 3)


def test_an_endless_one_needs_the_length_of_an_epoch():
    batches = PyBatches(Endless(36, 12))
    assert len(features(batches, 4, 5)) == 5
    with pytest.raises(UserError, match=r"never ends.*steps_per_epoch="):
        batches.epoch()


def test_processes_and_empty_ones_fail():
    with pytest.raises(UserError, match=r"use_multiprocessing=True.*workers=N starts threads"):
        PyBatches(Batches(40, 12, use_multiprocessing=True))
    with pytest.raises(UserError, match="has no batches"):
        PyBatches(Batches(0, 12))


class Changing(Batches):
    """Batches whose labels are integers in the first batch only."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y if index == 0 else y + 0.5


@pytest.mark.parametrize("workers", [1, 3])
def test_another_dtype_whose_numbers_would_be_rounded_fails(workers):
    batches = PyBatches(Changing(40, 12, workers=workers))
    match = r"^Changing returns an array of float64 in batch 1, but of int\d+ in its first batch"
    with pytest.raises(UserError, match=match), data_errors():
        list(batches.iterate_once())


class Unlabelled(Batches):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, None, np.ones(len(y), np.float32)


def test_weights_without_labels_fail_instead_of_becoming_labels():
    with pytest.raises(UserError, match=r"None before another part.*A sample_weight needs y"):
        PyBatches(Unlabelled(40, 12)).epoch()
