"""A resumed run, on any number of hosts, reads the same examples as the uninterrupted run."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.reading.shards import Piece, Shards

pytestmark = pytest.mark.slow

# Uneven shards, with an empty one and one longer than the index's stride; and a small data set.
LAYOUTS = ((5, 7, 0, 3, 19, 11, 600), (9, 2))
# Covers every number of hosts from 1 to 8, also hosts that have to share a track.
BATCHES = ((0, 24), (0, 35), (0, 56), (1, 8))  # (layout, batch size)
EPOCHS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


def source(folder, counts, **options) -> Shards:
    """Returns shards whose records are consecutive numbers."""
    number, pieces = 0, []
    for shard, count in enumerate(counts):
        path = folder / f"{len(counts)}-{shard}.tfrecord"
        numbers = [str(number + i).encode() for i in range(count)]
        if path.exists():
            written = tfrecord.scan_shard(str(path))
        else:
            written = tfrecord.write(str(path), numbers)
        pieces.append(Piece(str(path), count, 0, written.offsets, written.bytes))
        number += count
    return Shards(pieces, **{"shuffle": 64, **options})


@functools.cache
def entered(shards: Shards, batch: int, host: int, hosts: int, seed: int):
    """Returns a function (step, steps) -> the numbers of a host's parts of these batches.

    The step is a tensor, so that a hundred cases trace TensorFlow's graphs once.
    """
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False

    @tf.function(input_signature=[tf.TensorSpec((), tf.int64)] * 2)
    def read(step, steps):
        batches = tf.data.Dataset.from_tensors(step).flat_map(
            lambda step: shards.draw_records(batch, seed, step, host, hosts).take(steps)
        )
        records, numbers, _ = batches.with_options(options).batch(steps).get_single_element()
        return records, numbers

    def numbers_of(step: int, steps: int) -> np.ndarray:
        records, numbers = (part.numpy() for part in read(step, steps))
        assert records.astype(int).tolist() == numbers.tolist()
        return numbers

    return numbers_of


@functools.cache
def uninterrupted(shards: Shards, batch: int, seed: int) -> np.ndarray:
    """Returns the numbers that one host reads from the beginning, (steps, batch)."""
    steps = -(-EPOCHS * shards.count // batch) + 3
    return entered(shards, batch, 0, 1, seed)(0, steps)


@pytest.fixture(scope="module")
def sources(folder):
    return [source(folder, counts) for counts in LAYOUTS]


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_run_resumes_at_any_step_on_any_number_of_hosts(sources, data):
    layout, batch = data.draw(st.sampled_from(BATCHES))
    shards = sources[layout]
    hosts = data.draw(st.sampled_from([n for n in range(1, 9) if batch % n == 0]))
    host = data.draw(st.sampled_from(sorted({0, hosts - 1})))
    whole = uninterrupted(shards, batch, seed=7)
    stop = data.draw(st.integers(0, len(whole) - 2))
    steps = min(len(whole) - stop, data.draw(st.integers(1, 12)))
    share = batch // hosts
    expected = whole[stop : stop + steps, host * share : (host + 1) * share]
    assert entered(shards, batch, host, hosts, 7)(stop, steps).tolist() == expected.tolist()


@pytest.mark.parametrize("layout, batch", BATCHES)
def test_every_epoch_holds_every_example_once_in_another_order(sources, layout, batch):
    shards = sources[layout]
    stream = uninterrupted(shards, batch, 7).reshape(-1)
    epochs = stream[: EPOCHS * shards.count].reshape(EPOCHS, -1)
    for epoch in epochs:
        assert sorted(epoch) == list(range(shards.count))
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS
    assert uninterrupted(shards, batch, 8).reshape(-1).tolist() != stream.tolist()
