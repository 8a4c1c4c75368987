"""NaN, labels that are no classes, and ids above a vocabulary are named, before or after."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.training import compiled, examples, make_trainer
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.optim.losses import SmoothedCrossentropy

X, Y = examples(64)
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
TOKENS = np.random.default_rng(1).integers(0, 9, (64, 5))


def as_arrays(x, y):
    return {"x": x, "y": y, "batch_size": 16}


def as_batches(x, y):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(16)}


def changed(values: np.ndarray, value: float, *places: int) -> np.ndarray:
    """Returns a copy with another value in some examples."""
    copy = values.astype("float32") if isinstance(value, float) else values.copy()
    copy[list(places)] = value
    return copy


def embedding() -> keras.Model:
    layers = [keras.Input((5,), dtype="int32", name="tokens"), keras.layers.Embedding(9, 3)]
    return compiled(keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(4)]))


@pytest.mark.parametrize(
    "loss", [SPARSE, "sparse_categorical_crossentropy", SmoothedCrossentropy()]
)
@pytest.mark.parametrize("given", [as_arrays, as_batches])
@pytest.mark.parametrize("wrong", [4, -1, np.nan, 7.0])
def test_labels_that_are_no_classes_fail_before_training(loss, given, wrong):
    trainer = make_trainer(compiled(loss=loss, metrics=[]))
    found = r"y, the labels, has the value \S+ in the examples 3, 9 \(2 of (16|64)\), and the model"
    for method, options in ((trainer.fit, {"verbose": 0}), (trainer.evaluate, {})):
        with pytest.raises(UserError, match=found):
            method(**given(X, changed(Y, wrong, 3, 9)), **options)
    assert trainer.step == 0


@pytest.mark.parametrize("given", [as_arrays, as_batches])
def test_ids_above_the_vocabulary_fail_before_training(given):
    trainer = make_trainer(embedding())
    with pytest.raises(
        UserError, match=r"x has the value 9 in the example 2 .*has 9, so they .*voc"
    ):
        trainer.fit(**given(changed(TOKENS, 9, 2), Y), verbose=0)


def test_labels_without_a_weight_may_be_any():
    weights = np.ones(64, np.float32)
    weights[3] = 0.0
    model = compiled(loss=SmoothedCrossentropy(), metrics=[])
    given = {"batch_size": 64, "shuffle": False, "sample_weight": weights}
    history = make_trainer(model).fit(X, changed(Y, -100, 3), **given, verbose=0).history
    other = make_trainer(compiled(loss=SmoothedCrossentropy(), metrics=[]))
    assert other.fit(X, changed(Y, 2, 3), **given, verbose=0).history == history


def test_labels_of_a_later_batch_end_the_run_with_the_batch_and_the_example():
    trainer = make_trainer(compiled(loss=SmoothedCrossentropy(), metrics=[]), steps_per_loop=2)
    message = r"between step 3 and step 4 .*: in batch 4, y, .* has the value 4 in the example 2 "
    with pytest.raises(UserError, match=message):
        trainer.fit(**as_batches(X, changed(Y, 4, 50)), verbose=0)


def test_ops_of_a_cpu_that_find_a_number_too_large_are_explained():
    trainer = make_trainer(compiled(loss=SPARSE))
    with pytest.raises(UserError, match="A label is 4, and the model's output has 4 classes"):
        trainer.fit(**as_batches(X, changed(Y, 4, 50)), verbose=0)
    with pytest.raises(UserError, match="have the id 9, and an embedding of the model has 9"):
        make_trainer(embedding()).fit(**as_batches(changed(TOKENS, 9, 50), Y), verbose=0)


@pytest.mark.parametrize("given", [as_arrays, as_batches])
def test_nan_in_features_is_named_with_its_feature_and_its_examples(given):
    sides = {name: keras.Input((3,), name=name) for name in ("left", "right")}
    both = keras.layers.Concatenate()(list(sides.values()))
    model = compiled(keras.Model(sides, keras.layers.Dense(4)(both)))
    features = {"left": X[:, :3], "right": changed(X[:, 3:], np.nan, 4, 40)}
    place = "" if given is as_arrays else r"in batch 1, "
    rows = r"examples 4, 40 \(2 of 64\)" if given is as_arrays else r"example 4 \(1 of 16\)"
    message = rf"data are the cause: {place}x\['right'\] has NaN or infinite values in the {rows}"
    with pytest.raises(UserError, match=message):
        make_trainer(model).fit(**given(features, Y), verbose=0)


@pytest.mark.parametrize("on_nan", ["stop", "rollback"])
def test_nan_in_a_pipeline_with_epochs_is_named(on_nan, tmp_path):
    given = input_pipelines.from_arrays(changed(X, np.nan, 4), Y, global_batch_size=64)
    options = tftpu.TrainOptions(on_nan=on_nan, max_rollbacks=0)
    trainer = tftpu.Trainer(compiled(loss=SPARSE, metrics=[]), tmp_path, options)
    with pytest.raises(UserError, match=r"in batch 1, x has NaN or infinite values in the example"):
        trainer.fit(given, epochs=2, verbose=0)


def test_a_loss_that_diverges_on_sound_data_names_the_learning_rate():
    model = compiled(optimizer=keras.optimizers.SGD(1e38), loss="mse", metrics=[])
    with pytest.raises(UserError, match=r"no longer finite .*Lower the learning rate"):
        tftpu.Trainer(model).fit(X, X[:, :4], epochs=20, verbose=0)
