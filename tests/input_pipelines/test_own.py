"""A user's own data: plain `tf.data.Dataset`s, checked."""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines import own
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.input_pipelines.sources import Images, Synthetic, Text

X, Y = np.arange(20.0).reshape(10, 2), np.arange(10)


def slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


@dataclasses.dataclass
class Own(tftpu.DataConfig):
    make: Callable[[tftpu.DataContext], Any] = lambda context: slices().batch(4)
    made: Callable[[tftpu.DataContext], Any] = lambda context: None
    global_batch_size: int = 4

    def training(self, context: tftpu.DataContext) -> Any:
        return self.make(context)

    def evaluation(self, context: tftpu.DataContext) -> Any:
        return self.made(context)


def test_the_context_holds_seed_and_batch_size():
    seen = []

    def make(context):
        seen.append(context)
        return slices().batch(context.global_batch_size)

    input_pipelines.training(Own(make=make), seed=7)
    assert seen == [tftpu.DataContext(7, 4)]


def test_the_spec_of_a_batch_is_taken_from_the_data():
    spec = input_pipelines.batch_spec(Own(), 32)
    assert spec == (tf.TensorSpec((32, 2), tf.float32), tf.TensorSpec((32,), tf.int64))


def test_the_spec_of_shapes_that_only_a_batch_tells():
    def generated(context):
        spec = tf.TensorSpec((None,), tf.float32)
        data = tf.data.Dataset.from_generator(lambda: iter(X), output_signature=spec)
        return data.batch(context.global_batch_size)

    assert input_pipelines.batch_spec(Own(make=generated), 8) == tf.TensorSpec((8, 2), tf.float32)


def test_own_specs_and_pipelines_are_used_as_they_are():
    pipeline = input_pipelines.from_arrays(X, Y, global_batch_size=4)
    assert input_pipelines.training(Own(make=lambda context: pipeline)) is pipeline
    assert input_pipelines.steps_per_epoch(Own(), pipeline) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda context: None, "training() returns nothing: return a tf.data.Dataset"),
        (lambda context: (X, Y), "training() returns a tuple"),
        (lambda context: slices(), "end the data set with .batch(…)"),
        (lambda context: slices().batch(5), "returns batches of 5 examples, but data.global_batch"),
        (
            lambda context: slices().batch(2),
            "end the data set with .batch(context.global_batch_size)",
        ),
        (
            lambda context: slices().take(3).batch(context.global_batch_size),
            "returns only 3 examples, fewer than data.global_batch_size=4: lower",
        ),
        (lambda context: slices().take(0).batch(4), "returns an empty data set"),
        (lambda context: input_pipelines.from_arrays(X, global_batch_size=2), "batches of 2"),
    ],
)
def test_wrong_training_data_say_what_to_return(make, message):
    with pytest.raises(UserError) as error:
        input_pipelines.training(Own(make=make))
    assert message in str(error.value)


def test_evaluation_is_a_data_set_or_none():
    assert input_pipelines.evaluation(Own()) is None
    with pytest.raises(UserError, match=r"Own\.evaluation\(\) returns a tuple"):
        input_pipelines.evaluation(Own(made=lambda context: (X, Y)))


def test_the_batches_of_an_epoch_are_counted():
    def steps(dataset: tf.data.Dataset) -> int:
        return input_pipelines.steps_per_epoch(Own(), dataset)

    assert steps(slices().batch(4)) == 3  # 4, 4 and 2 examples
    assert steps(slices().batch(4, drop_remainder=True)) == 2
    data = Synthetic(examples=70, global_batch_size=32, spec=("x: float32[2]", "y: float32"))
    assert input_pipelines.steps_per_epoch(data, input_pipelines.training(data)) == 3
    with pytest.raises(UserError, match=r"never ends\. Set train\.steps instead"):
        steps(slices().batch(4).repeat())
    with pytest.raises(UserError, match="has no known length"):
        steps(slices().filter(lambda x, y: y > 1).batch(4))


def test_an_evaluation_split_that_may_have_no_end_is_told_while_it_is_read(monkeypatch, caplog):
    monkeypatch.setattr(own, "_LONG", 0.1)

    def batches():
        while "has not ended yet" not in caplog.text:
            yield X[:4], Y[:4]

    specs = tuple(tf.TensorSpec((4, *part.shape[1:]), part.dtype) for part in (X, Y))
    endless = tf.data.Dataset.from_generator(batches, output_signature=specs)
    context = tftpu.DataContext(0, 4)
    own.open_records(Own(made=lambda context: endless), "evaluation", context)
    assert "If it never ends, limit it with .take(batches)" in caplog.text


def test_reading_starts_at_any_step_and_repeats():
    batches = input_pipelines.starting_at(slices().batch(5), 3)
    first = next(batches.as_numpy_iterator())
    np.testing.assert_array_equal(first[1], Y[5:])


def read_from_files(array):
    """Returns a pipeline of an array as the sources of files make it."""
    return ArrayPipeline({"x": array}, 1, 0, lambda batch, seeds: batch, from_files=True)


@pytest.mark.parametrize("dtype", ["uint8", "float32", ml_dtypes.bfloat16, object])
def test_the_state_tells_other_examples_of_the_same_number(dtype):
    first, second = np.zeros((3, 2), dtype), np.zeros((3, 2), dtype)
    assert describe_content(first) == describe_content(second)
    second[2, 1] = 1
    assert describe_content(first) != describe_content(second)
    assert describe_content(first) != describe_content(first.reshape(3, 1, 2))


def describe_content(array):
    return input_pipelines.describe_state(read_from_files(array))["content"]


@pytest.mark.medium
@pytest.mark.parametrize(
    "data", [Images(name="digits"), Text(name="python_source")], ids=["images", "text"]
)
def test_the_state_of_a_source_in_memory_holds_its_content(data):
    assert "content" in input_pipelines.describe_state(input_pipelines.training(data))


def test_the_state_of_training_data_is_as_much_as_is_known_of_them():
    numbers = tf.data.Dataset.range(10).batch(4)
    assert input_pipelines.describe_state(numbers) == {"batches": 3}
    assert input_pipelines.describe_state(numbers.repeat()) == {}
    assert input_pipelines.describe_state(read_from_files(np.zeros(3)))["examples"] == 3
    arrays = input_pipelines.from_arrays(np.zeros((10, 2), np.float32), global_batch_size=4)
    assert input_pipelines.describe_state(arrays) == {"examples": 10}


def test_a_field_that_cannot_be_kept_is_answered_with_the_columns_to_join_by():
    @dataclasses.dataclass
    class Table(Own):
        def prediction(self, address: str, context: tftpu.DataContext) -> Any:
            return X

    records = input_pipelines.prediction(Table(), "new.csv")
    assert records.places(range(1, 3)) == (["new.csv"] * 2, [1, 2])
    with pytest.raises(UserError, match=r"none to keep.*Texts have 'text'.*class of your own") as e:
        records.read_fields(range(0), ["review"])
    assert str(e.value).endswith("the record, from 0: use these to join other columns.")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((5, 7), "The features of 'new.csv' are arrays of 5, 7 examples: all must hold the same"),
        ((0, 0), "There are no records in 'new.csv': name an input with at least one."),
    ],
)
def test_records_of_unequal_or_no_features_are_refused(sizes, said):
    class Table(tftpu.DataConfig):
        def prediction(self, address, context):
            return {name: np.zeros((size, 2)) for name, size in zip("ab", sizes)}

    with pytest.raises(UserError, match=said):
        input_pipelines.prediction(Table(), "new.csv")
