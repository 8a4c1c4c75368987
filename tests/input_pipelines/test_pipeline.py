"""Pipelines: the order of examples, their shapes, and their errors."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tftpu
from tftpu import input_pipelines
from tftpu.engines.tensorflow import feed
from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import small
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.input_pipelines.sources import Images, Synthetic, Text
from tftpu.launch.settings import config_flags


def numbers(count: int, batch: int, seed: int = 0) -> ArrayPipeline:
    return ArrayPipeline(
        examples=np.arange(count),
        global_batch_size=batch,
        seed=seed,
        prepare=lambda examples, seeds: (examples, seeds),
    )


def first(dataset: tf.data.Dataset, batches: int) -> list[list[int]]:
    return [list(map(int, batch)) for batch, _ in dataset.take(batches).as_numpy_iterator()]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 30),
    batch=st.integers(1, 12),
    start=st.integers(0, 12),
    seed=st.integers(0, 3),
)
def test_a_pipeline_started_at_a_step_gives_the_rest_of_the_stream(count, batch, start, seed):
    pipeline = numbers(count, batch, seed)
    assert (
        first(pipeline.starting_at(start), 4) == first(pipeline.starting_at(0), start + 4)[start:]
    )


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_hosts_parts_together_are_the_batch(hosts):
    pipeline = numbers(24, 8)
    whole = first(pipeline.starting_at(2), 5)
    parts = [first(pipeline.starting_at(2, host, hosts), 5) for host in range(hosts)]
    assert [[i for part in batch for i in part] for batch in zip(*parts)] == whole


def test_hosts_that_do_not_divide_the_batch_fail_with_a_clear_error():
    with pytest.raises(UserError, match="8 cannot be divided among 3 hosts"):
        numbers(24, 8).starting_at(0, 0, 3)


@pytest.mark.medium
def test_eight_replicas_get_the_batch_in_its_order():
    strategy = tftpu.connect(virtual_devices=8).strategy
    iterator = feed.iterate_training_batches(numbers(24, 16), 3, strategy)
    (examples, _) = next(iterator)
    shares = [share.numpy() for share in strategy.experimental_local_results(examples)]
    assert [len(share) for share in shares] == [2] * 8
    assert np.concatenate(shares).tolist() == first(numbers(24, 16).starting_at(3), 1)[0]


def test_every_epoch_holds_every_example_once_in_its_own_order():
    stream = np.concatenate(first(numbers(24, 8).starting_at(0), 9))
    epochs = stream.reshape(3, 24)
    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tuple(epochs[0]) != tuple(range(24))
    other = np.concatenate(first(numbers(24, 8, seed=1).starting_at(0), 3))
    assert tuple(other) != tuple(epochs[0])


def test_no_two_examples_of_two_epochs_draw_the_same_augmentation():
    seeds = [tuple(s) for _, batch in numbers(24, 8).starting_at(0).take(6) for s in batch.numpy()]
    assert len(set(seeds)) == 48
    # They are random numbers, too: each bit is set about half of the time.
    bits = np.unpackbits(np.array(seeds, np.int32).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 3 * 0.5 / np.sqrt(bits.size)


@pytest.mark.medium
@pytest.mark.parametrize("config", ["digits_resnet", "python_gpt"])
def test_batches_match_the_spec(config):
    data = config_flags.load(config, []).data
    expected = input_pipelines.batch_spec(data, data.global_batch_size)
    training = input_pipelines.training(data, 0).starting_at(3)
    assert training.element_spec == expected
    for spec, seen in zip(expected, input_pipelines.evaluation(data).element_spec):
        assert (seen.dtype, seen.shape[1:]) == (spec.dtype, spec.shape[1:])


def test_the_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    data = config_flags.load("digits_resnet", []).data
    data.shift = 0
    labels, pixels = collections.Counter(), 0.0
    for images, classes in input_pipelines.evaluation(data).as_numpy_iterator():
        labels.update(classes.tolist())
        pixels += ((images + 1.2) * 64.0).sum()
    assert sum(labels.values()) == 360
    train = input_pipelines.training(data, 0)
    labels.update(train.examples["label"].tolist())
    pixels += train.examples["image"].sum()
    digits = load_digits()
    assert labels == collections.Counter(digits.target.tolist())
    assert pixels == pytest.approx((digits.images * 255 / 16).round().sum(), rel=1e-5)


def test_a_shifted_image_is_the_image_moved():
    data = config_flags.load("digits_resnet", []).data
    data.shift = 2
    pipeline = input_pipelines.training(data, 0)
    example = {name: tf.constant(array[:1]) for name, array in pipeline.examples.items()}
    still = np.pad(example["image"].numpy()[0, ..., 0].astype(np.float32), 2)
    seen = set()
    for seed in range(40):
        images, _ = pipeline.prepare(example, tf.constant([[seed, seed // 5 - 3]]))
        pixels = np.round((images.numpy()[0, ..., 0] + 1.2) * 64.0)
        places = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if np.array_equal(still[y : y + 8, x : x + 8], pixels)
        ]
        assert places
        seen.add(places[0])
    assert len(seen) > 10


def test_a_tfds_data_set_that_is_not_prepared_fails_with_advice(tmp_path):
    with pytest.raises(UserError, match=r"run `python -c .*tfds\.builder\('mnist'"):
        input_pipelines.training(Images("mnist", data_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a b", "", "mnist:9.9.9", "mnist/other"])
def test_a_name_that_tfds_cannot_read_is_one_clear_error(name):
    with pytest.raises(UserError, match=r"TFDS has no data set .* data\.data_dir") as error:
        input_pipelines.training(Images(name))
    assert "\n" not in str(error.value)


def test_random_data_that_do_not_fit_into_memory_fail_with_a_clear_error():
    data = Synthetic(spec=("x: float32[99999999]", "y: int32 num_classes=2"))
    with pytest.raises(UserError, match=r"The 1024 examples of data.spec take 381 GiB, more"):
        input_pipelines.training(data)


def test_an_unknown_data_set_or_split_fails_with_a_clear_error():
    with pytest.raises(UserError, match=r"There is no data set 'digitz'. Did you mean 'digits'"):
        input_pipelines.training(Images("digitz"))
    with pytest.raises(UserError, match=r"no split 'tests'. Did you mean 'test'"):
        input_pipelines.evaluation(Images("digits", eval_split="tests", image_size=8, channels=1))


def test_documents_without_two_bytes_fail_with_a_clear_error(monkeypatch):
    texts = np.array([b"", b"a"], object)
    monkeypatch.setattr(small, "load_split", lambda *_: {"text": texts})
    data = Text("python_source", context=50, global_batch_size=4)
    for read in (input_pipelines.training, input_pipelines.evaluation):
        with pytest.raises(UserError, match="of 'python_source' has no document of two bytes"):
            read(data)


def test_a_window_is_followed_by_the_byte_it_overlaps_with():
    data = Text("python_source", context=50, global_batch_size=4)
    x, y, w = next(input_pipelines.evaluation(data).as_numpy_iterator())
    assert (x[:, 1:] == y[:, :-1]).all()
    assert x[1, 0] == y[0, -1]
    assert w.min() == 1.0
