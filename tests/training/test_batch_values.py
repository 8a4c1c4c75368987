"""NaN, labels that are not classes, and ids above a vocabulary are named, before or after."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.training import compiled, examples, make_trainer
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.training import batch_values

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


def embedding_alone() -> keras.Model:
    layers = [keras.Input((5,), dtype="int32", name="tokens"), keras.layers.Embedding(9, 3)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(4)])
    model.compile("sgd")
    return model


def embedding() -> keras.Model:
    return compiled(embedding_alone())


@pytest.mark.parametrize(
    "loss", [SPARSE, "sparse_categorical_crossentropy", SmoothedCrossentropy()]
)
@pytest.mark.parametrize("wrong", [4, -1, np.nan, 7.0, 1.5])
def test_labels_in_arrays_that_are_no_classes_fail_before_training(loss, wrong):
    trainer = make_trainer(compiled(loss=loss, metrics=[]))
    found = r"y, the labels, has the value \S+ in the examples 3, 9 \(2 of 64\), and the model"
    for method, options in ((trainer.fit, {"verbose": 0}), (trainer.evaluate, {})):
        with pytest.raises(UserError, match=found):
            method(**as_arrays(X, changed(Y, wrong, 3, 9)), **options)
    assert trainer.step == 0


def test_ids_in_arrays_above_the_vocabulary_fail_before_training():
    trainer = make_trainer(embedding())
    message = r"x has the value 9 in the example 2 .*has 9, so they .*larger than the model's\.$"
    with pytest.raises(UserError, match=message):
        trainer.fit(**as_arrays(changed(TOKENS, 9, 2), Y), verbose=0)


@pytest.mark.medium
@pytest.mark.parametrize("make", [compiled, embedding])
def test_data_sets_are_not_read_for_their_values_before_training(make):
    features = X if make is compiled else TOKENS
    seen = []

    def batches():
        for start in range(0, 64, 16):
            seen.append(start)
            yield features[start : start + 16], Y[start : start + 16]

    kinds = tf.type_spec_from_value(features[:16]), tf.type_spec_from_value(Y[:16])
    dataset = tf.data.Dataset.from_generator(batches, output_signature=kinds)
    trainer = make_trainer(make())
    trainer.evaluate(dataset, steps=2, return_dict=True)
    first = len(seen)
    trainer.evaluate(dataset, steps=2, return_dict=True)
    again = len(seen) - first
    seen.clear()
    list(dataset.take(2))  # what reading alone takes
    assert (first, again) == (len(seen), len(seen))


class Cleaned(keras.losses.SparseCategoricalCrossentropy):
    """Takes labels of -1, which count nothing."""

    def call(self, y_true, y_pred):
        kept = keras.ops.cast(y_true >= 0, "float32")
        return super().call(keras.ops.maximum(y_true, 0), y_pred) * kept


class CleanedSequences(keras.losses.SparseCategoricalCrossentropy):
    """Takes labels of -1, and returns one number for each sequence."""

    def call(self, y_true, y_pred):
        kept = keras.ops.cast(y_true >= 0, "float32")
        losses = super().call(keras.ops.maximum(y_true, 0), y_pred) * kept
        return keras.ops.mean(losses, axis=-1)


def cleaned_by_a_model() -> keras.Model:
    class Cleaning(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, keras.ops.maximum(y, 0), y_pred, sample_weight, training)

    inputs = keras.Input((X.shape[1],))
    return compiled(Cleaning(inputs, keras.layers.Dense(4)(inputs)), metrics=[])


def hashed() -> keras.Model:
    class Hashed(keras.layers.Embedding):
        def call(self, inputs):
            return super().call(inputs % self.input_dim)

    layers = [keras.Input((5,), dtype="int32"), Hashed(9, 3), keras.layers.Flatten()]
    return compiled(keras.Sequential([*layers, keras.layers.Dense(4)]), metrics=[])


def bounded_between_layers() -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    layer = keras.layers.Embedding(9, 3)
    layer(inputs)  # as one tries a layer out
    embedded = keras.layers.Flatten()(layer(keras.ops.mod(inputs, 9)))
    return compiled(keras.Model(inputs, keras.layers.Dense(4)(embedded)), metrics=[])


def cleaned_in_its_call() -> keras.Model:
    class Bounded(keras.Model):
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs % 9, training=training, mask=mask)

    inputs = keras.Input((5,), dtype="int32")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(inputs))
    return compiled(Bounded(inputs, keras.layers.Dense(4)(embedded)), metrics=[])


def tagger(loss: keras.losses.Loss, mask_zero: bool = False) -> keras.Model:
    layers = [keras.Input((5,), dtype="int32"), keras.layers.Embedding(9, 3, mask_zero=mask_zero)]
    model = keras.Sequential([*layers, keras.layers.Dense(4)])
    return compiled(model, loss=loss, metrics=[])


TAGS = np.tile(Y[:, None], (1, 5))
CLEANED = {
    "by a loss": (lambda: compiled(loss=Cleaned(from_logits=True), metrics=[]), X, (Y, -1)),
    "of sequences": (lambda: tagger(CleanedSequences(from_logits=True)), TOKENS, (TAGS, -1)),
    "by compute_loss": (cleaned_by_a_model, X, (Y, -1)),
    "by an embedding": (hashed, (TOKENS, 12), Y),
    "between layers": (bounded_between_layers, (TOKENS, 12), Y),
    "by the model": (cleaned_in_its_call, (TOKENS, 12), Y),
}


@pytest.mark.medium
@pytest.mark.parametrize("given", [as_arrays, as_batches])
@pytest.mark.parametrize("cleaned", list(CLEANED))
def test_what_code_of_the_users_own_replaces_is_trained_on_as_keras_does(cleaned, given):
    make, *parts = CLEANED[cleaned]
    x, y = (changed(*part, 3, 50) if isinstance(part, tuple) else part for part in parts)
    model = make()
    options = {"shuffle": False} if given is as_arrays else {}
    weights = model.get_weights()
    history = make_trainer(model).fit(**given(x, y), **options, verbose=0).history
    other = make()
    other.set_weights(weights)
    expected = other.fit(x, y, batch_size=16, shuffle=False, verbose=0).history
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.medium
def test_ids_that_a_loss_function_replaces_are_trained_on():
    def loss_fn(model, batch, training):
        tokens, labels = batch
        logits = model(keras.ops.maximum(tokens, 0), training=training)
        return keras.ops.sparse_categorical_crossentropy(labels % 4, logits, from_logits=True)

    trainer = tftpu.Trainer(embedding_alone(), loss_fn=loss_fn)
    history = trainer.fit(changed(TOKENS, -1, 2), Y + 4, batch_size=16, verbose=0).history
    assert np.isfinite(history["loss"]).all()


@pytest.mark.medium
def test_tags_at_masked_positions_may_be_any():
    loss = SmoothedCrossentropy()
    tokens, tags = TOKENS.copy(), TAGS.copy()
    tokens[:, 3:], tags[:, 3:] = 0, -1
    model = tagger(loss, mask_zero=True)
    trainer = make_trainer(model)
    found = trainer.evaluate(**as_arrays(tokens, tags), return_dict=True)
    expected = trainer.evaluate(**as_arrays(tokens, np.maximum(tags, 0)), return_dict=True)
    assert found == expected
    assert np.isfinite(found["loss"])


def test_labels_of_examples_are_compared_even_if_a_layer_masks_tokens():
    model = tagger(SmoothedCrossentropy(), mask_zero=True)
    pooled = keras.layers.GlobalAveragePooling1D()(model.outputs[0])
    trainer = make_trainer(compiled(keras.Model(model.inputs, pooled), metrics=[]))
    with pytest.raises(UserError, match="y, the labels, has the value 4 in the example 3 "):
        trainer.fit(**as_arrays(TOKENS, changed(Y, 4, 3)))


@pytest.mark.medium
def test_labels_without_a_weight_may_be_any():
    weights = np.ones(64, np.float32)
    weights[3] = 0.0
    model = compiled(loss=SmoothedCrossentropy(), metrics=[])
    given = {"batch_size": 64, "shuffle": False, "sample_weight": weights}
    history = make_trainer(model).fit(X, changed(Y, -100, 3), **given, verbose=0).history
    other = make_trainer(compiled(loss=SmoothedCrossentropy(), metrics=[]))
    assert other.fit(X, changed(Y, 2, 3), **given, verbose=0).history == history


@pytest.mark.medium
@pytest.mark.parametrize("wrong", [4, 1.5])
def test_labels_of_a_later_batch_end_the_run_with_the_batch_and_the_example(wrong):
    trainer = make_trainer(compiled(loss=SmoothedCrossentropy(), metrics=[]), steps_per_loop=2)
    message = (
        rf"between step 3 and step 4 .*: in batch 4, y, .* the value {wrong} in the example 2 "
    )
    with pytest.raises(UserError, match=message):
        trainer.fit(**as_batches(X, changed(Y, wrong, 50)), verbose=0)


@pytest.mark.medium
def test_ops_of_a_cpu_that_find_a_number_too_large_are_explained():
    trainer = make_trainer(compiled(loss=SPARSE))
    with pytest.raises(UserError, match="A label is 4, and the model's output has 4 classes"):
        trainer.fit(**as_batches(X, changed(Y, 4, 50)), verbose=0)
    with pytest.raises(UserError, match="have the id 9, and an embedding of the model has 9"):
        make_trainer(embedding()).fit(**as_batches(changed(TOKENS, 9, 50), Y), verbose=0)


@pytest.mark.medium
@pytest.mark.parametrize("given", [as_arrays, as_batches])
def test_nan_in_features_is_named_with_its_feature_and_its_examples(given):
    sides = {name: keras.Input((3,), name=name) for name in ("left", "right")}
    both = keras.layers.Concatenate()(list(sides.values()))
    model = compiled(keras.Model(sides, keras.layers.Dense(4)(both)))
    features = {"left": X[:, :3], "right": changed(X[:, 3:], np.nan, 4, 40)}
    place = "" if given is as_arrays else r"in batch 1, "
    rows = r"examples 4, 40 \(2 of 64\)" if given is as_arrays else r"example 4 \(1 of 16\)"
    message = rf"data \w+( \w+)? the cause: {place}x\['right'\] has NaN values in the {rows}"
    with pytest.raises(UserError, match=message):
        make_trainer(model).fit(**given(features, Y), verbose=0)


@pytest.mark.medium
@pytest.mark.parametrize("on_nan", ["stop", "rollback"])
def test_nan_in_a_pipeline_with_epochs_is_named(on_nan, tmp_path):
    given = input_pipelines.from_arrays(changed(X, np.nan, 4), Y, global_batch_size=64)
    options = tftpu.TrainConfig(on_nan=on_nan, max_rollbacks=0)
    trainer = tftpu.Trainer(compiled(loss=SPARSE, metrics=[]), tmp_path, options)
    with pytest.raises(UserError, match=r"in batch 1, x has NaN values in the example"):
        trainer.fit(given, epochs=2, verbose=0)


@pytest.mark.medium
def test_a_loss_that_diverges_on_sound_data_names_the_learning_rate():
    model = compiled(optimizer=keras.optimizers.SGD(1e38), loss="mse", metrics=[])
    with pytest.raises(UserError, match=r"no longer finite .*Lower the learning rate"):
        tftpu.Trainer(model).fit(X, X[:, :4], epochs=20, verbose=0)


@pytest.mark.medium
@pytest.mark.parametrize("given", [as_arrays, as_batches])
def test_texts_that_are_all_padding_are_named(given):
    layers = [
        keras.Input((5,), dtype="int32"),
        keras.layers.Embedding(9, 3, mask_zero=True),
        keras.layers.GlobalAveragePooling1D(),  # 0 / 0 of no token
        keras.layers.Dense(4),
    ]
    tokens = changed(TOKENS + (TOKENS == 0), 0, 3)
    with pytest.raises(UserError, match=r"x has only padding in the example 3 \(1 of"):
        make_trainer(compiled(keras.Sequential(layers))).fit(**given(tokens, Y), verbose=0)


@pytest.mark.medium
def test_more_classes_than_outputs_are_refused_without_a_batch():
    model = compiled(loss=SPARSE, metrics=[])
    make_trainer(model).fit(X, Y, batch_size=16, epochs=1, verbose=0)
    batch_values.check_classes(model, (X, Y), 4)
    with pytest.raises(UserError, match=r"data have 5 classes .* output has 4 classes: give the"):
        batch_values.check_classes(model, (X, Y), 5)
