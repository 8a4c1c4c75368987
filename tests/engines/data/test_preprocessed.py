"""Data that a model's own preprocessor prepares, as KerasHub's own `fit` does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.hub.byte_gpt2 import build_byte_gpt2
from tests.support.models.training import compiled, make_trainer
from tftpu.errors import UserError

TEXTS = [f"{number} comes before {number + 1}" for number in range(20)]
IMAGES = np.random.default_rng(0).integers(0, 255, (20, 4)).astype("float32")
LABELS = np.arange(20) % 4


class Task(keras.Sequential):
    """A model with KerasHub's interface, which scales what it is given."""

    preprocessor = keras.layers.Rescaling(1 / 255)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        return keras.utils.pack_x_y_sample_weight(self.preprocessor(x), y, sample_weight)

    def fit(self, *args, **kwargs):
        raise AssertionError("the trainer runs its own loop")


def task(**attributes) -> keras.Model:
    keras.utils.set_random_seed(0)
    with tftpu.connect().scope():
        model = Task([keras.Input((4,)), keras.layers.Dense(4)])
        for name, value in attributes.items():
            setattr(model, name, value)
        return compiled(model)


def language_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    with tftpu.connect().scope():
        return compiled(build_byte_gpt2(24))


def batches(*parts: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(parts).batch(8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "prepared"),
    [
        ((IMAGES, LABELS), (IMAGES / 255, LABELS)),
        ((batches(IMAGES, LABELS),), (batches(IMAGES / 255, LABELS),)),
        ((list(IMAGES), LABELS, LABELS + 1), (IMAGES / 255, LABELS, LABELS + 1)),
    ],
    ids=["arrays", "data set", "list and weights"],
)
def test_the_preprocessor_is_mapped_over_the_data(given, prepared):
    def train(model, x, y=None, weight=None):
        size = {} if y is None else {"batch_size": 8}
        trainer = make_trainer(model)
        history = trainer.fit(
            x, y, sample_weight=weight, epochs=2, shuffle=False, verbose=0, **size
        )
        return history.history["loss"], trainer.evaluate(x, y, sample_weight=weight, **size)

    ours, expected = train(task(), *given), train(task(preprocessor=None), *prepared)
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-6)


@pytest.mark.medium
def test_predictions_and_the_validation_split_are_of_preprocessed_data():
    raw, plain = make_trainer(task()), make_trainer(task(preprocessor=None))
    np.testing.assert_allclose(raw.predict(IMAGES), plain.predict(IMAGES / 255), atol=1e-6)
    arguments = {"validation_split": 0.25, "shuffle": False, "verbose": 0}
    ours = raw.fit(IMAGES, LABELS, **arguments).history
    expected = plain.fit(IMAGES / 255, LABELS, **arguments).history
    np.testing.assert_allclose(ours["val_loss"], expected["val_loss"], rtol=1e-6)


@pytest.mark.medium
def test_a_resumed_run_sees_the_same_shuffled_batches(tmp_path):
    def train(workdir, epochs):
        trainer = make_trainer(task(), workdir)
        trainer.fit(IMAGES, LABELS, batch_size=8, epochs=epochs, verbose=0)
        return trainer.model.get_weights()

    train(tmp_path / "twice", 1)
    for ours, expected in zip(train(tmp_path / "twice", 2), train(tmp_path / "once", 2)):
        np.testing.assert_array_equal(ours, expected)


def test_data_that_the_preprocessor_cannot_take_are_answered_by_what_to_write():
    def fails(x, y=None):
        raise ValueError("Exception encountered when calling Tokenizer.call().\n\nGive texts.")

    trainer = make_trainer(task(preprocessor=fails))
    said = r"of Task, .* fails: Give texts. Pass the data .* set model.preprocessor = None"
    with pytest.raises(UserError, match=said):
        trainer.fit(IMAGES, LABELS)
    pipeline = tftpu.input_pipelines.from_arrays(IMAGES, LABELS, global_batch_size=4)
    with pytest.raises(UserError, match=r"cannot be mapped over .*model.preprocessor = None"):
        trainer.fit(pipeline, steps=1)
    with pytest.raises(UserError, match="The data is 'a text': pass arrays"):
        trainer.predict("a text")
    with pytest.raises(UserError, match="hold no examples"):
        trainer.predict([])


@pytest.mark.slow
def test_texts_train_as_the_tokens_that_kerashubs_preprocessor_makes_of_them():
    prepared = language_model()
    x, y, weight = keras.tree.map_structure(np.asarray, prepared.preprocessor(TEXTS))
    prepared.preprocessor = None
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
    expected = make_trainer(prepared).fit(
        x, y, sample_weight=weight, batch_size=8, validation_data=(x, y, weight), **arguments
    )
    for data in (TEXTS, np.array(TEXTS), batches(np.array(TEXTS)).map(lambda text: text)):
        model, size = language_model(), {} if hasattr(data, "map") else {"batch_size": 8}
        trainer = make_trainer(model)
        ours = trainer.fit(data, validation_data=(TEXTS,), **size, **arguments)
        for name, values in expected.history.items():
            np.testing.assert_allclose(ours.history[name], values, rtol=1e-5)
        assert trainer.predict(TEXTS).shape == (20, 24, 258)


@pytest.mark.slow
def test_tokens_for_a_model_that_takes_texts_are_refused_as_by_kerashub():
    model = language_model()
    x, y, _ = keras.tree.map_structure(np.asarray, model.preprocessor(TEXTS))
    with pytest.raises(UserError, match=r"should be a string .*set model.preprocessor = None"):
        make_trainer(model).fit(x, y)
