"""Wrong calls of `fit`, `evaluate` and `predict` fail with what to write instead."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.data.py_batches import Batches
from tests.support.models.strategies import mlp
from tests.support.models.training import compiled, data, examples, make_trainer
from tftpu.errors import UserError

X, Y = examples(40)
WEIGHTS = np.ones(40)

WRONG = {
    "a length without a keyword": ((data(), 600), {}, r"write fit\(data, steps=600\)"),
    "one tuple": (((X, Y),), {}, r"passed as one tuple\. Write fit\(x, y"),
    "labels beside a data set": ((data(), Y), {}, "y works only with arrays, but the data is a"),
    "weights beside a data set": (
        (data(),),
        {"sample_weight": WEIGHTS},
        "sample_weight works only with",
    ),
    "batch_size of a data set": ((data(),), {"batch_size": 8}, "batch_size works only with arrays"),
    "a split of a data set": ((data(),), {"validation_split": 0.1}, r"pass validation_data="),
    "both lengths": ((X, Y), {"epochs": 2, "steps": 9}, "epochs=2 and steps=9 both set"),
    "steps of what": ((X, Y), {"steps": 9, "steps_per_epoch": 3}, "eval_every= sets the number"),
    "eval_every of epochs": (
        (X, Y),
        {"epochs": 2, "eval_every": 3},
        r"works only with steps=\. With",
    ),
    "initial_epoch of steps": ((X, Y), {"steps": 9, "initial_epoch": 3}, "works only with epochs="),
    "half an epoch": ((X, Y), {"epochs": 0.5}, r"epochs is 0\.5"),
    "no batch": ((X, Y), {"batch_size": 0}, "batch_size is 0"),
    "unequal lengths": ((X, Y[:30]), {}, r"x 40, y 30"),
    "texts": ((np.array(["a", "b"]), Y[:2]), {}, r"<U1, .* apply it to the data: fit\(vectorize"),
    "texts of pandas": ((np.array(["a", "b"], object), Y[:2]), {}, r"object, .* fit\(vectorize"),
    "no texts": ((np.array([None, 1]), Y[:2]), {}, r"object, .*: convert it to numbers\.$"),
    "batches of texts": (
        (tf.data.Dataset.from_tensors((["a", "b"], Y[:2])),),
        {},
        r"a string tensor, .* dataset\.map\(lambda x, y: \(vectorize\(x\), y\)\)",
    ),
    "nothing": ((X[:0], Y[:0]), {}, "hold no examples"),
    "lists of numbers": (([[0.0] * 6] * 40, Y), {}, r"Convert lists of numbers with np\.array"),
    "strings": ((np.array(["a"] * 40), Y), {}, "array of <U1"),
    "no data": ((None, Y), {}, "The data is None"),
    "an empty generator": ((iter(()),), {}, "has no batches left"),
    "a class as callback": ((X, Y), {"callbacks": keras.callbacks.EarlyStopping}, "a class"),
    "verbose": ((X, Y), {"verbose": 3}, "must be 'auto', 0, 1 or 2"),
    "shuffle": ((X, Y), {"shuffle": "batch"}, "must be True or False"),
    "both weights": (
        *((X, Y), {"sample_weight": WEIGHTS, "class_weight": {0: 2.0}}, "exclude each other"),
    ),
    "weights without labels": ((X,), {"sample_weight": WEIGHTS}, "sample_weight needs y"),
    "an empty split": ((X, Y), {"validation_split": 0.999}, "leaves one part empty"),
    "a split above 1": ((X, Y), {"validation_split": 5}, "must be between 0 and 1"),
    "validation without labels": ((X, Y), {"validation_data": X}, r"pass \(x, y\)"),
    "validation of four": ((X, Y), {"validation_data": (X, Y, X, Y)}, "4 parts"),
    "validation_steps alone": ((X, Y), {"validation_steps": 2}, "needs validation_data="),
    "class_weight as a list": ((X, Y), {"class_weight": [1, 2]}, r"it must be a dict, such as \{0"),
    "class_weight as in sklearn": ((X, Y), {"class_weight": "balanced"}, "it must be a dict"),
    "a label that is a text": ((X, Y), {"class_weight": {"0": 2.0}}, "has the label '0'"),
    "a label between two": ((X, Y), {"class_weight": {0.5: 2.0}}, r"has the label 0\.5"),
    "a label that is not a number": ((X, Y), {"class_weight": {np.nan: 2.0}}, "has the label nan"),
    "a label below 0": (
        (X, Y),
        {"class_weight": {-1: 2.0}},
        "has the label -1: labels must be whole",
    ),
    "a weight that is a text": ((X, Y), {"class_weight": {0: "a"}}, "has the weight 'a'"),
    "validation_freq": ((X, Y), {"validation_freq": 0}, "validation_freq is 0: it must be"),
    "frequent": ((X, Y), {"steps": 2, "validation_freq": 2}, "validation_freq works only with epo"),
    "nb_epoch": ((X, Y), {"nb_epoch": 2}, "fit has no nb_epoch: write epochs="),
    "workers": ((X, Y), {"workers": 2}, r"fit has no workers: pass it to the keras\.utils\.PyD"),
    "endless epochs": ((data().repeat(),), {"epochs": 2}, r"pass steps_per_epoch="),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_says_what_to_write(case):
    given, arguments, sentence = WRONG[case]
    trainer = make_trainer(compiled())
    with pytest.raises(UserError, match=sentence):
        trainer.fit(*given, **arguments)
    assert trainer.step == 0


def test_evaluate_and_predict_say_what_to_write():
    trainer = make_trainer(compiled())
    with pytest.raises(UserError, match="y works only with arrays"):
        trainer.evaluate(data(), Y, return_dict=True)
    with pytest.raises(UserError, match="steps is 0"):
        trainer.evaluate(X, Y, steps=0, return_dict=True)
    with pytest.raises(UserError, match="batch_size works only with arrays"):
        trainer.predict(data(), batch_size=8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'banana'"):
        trainer.evaluate(X, Y, banana=1, return_dict=True)


@pytest.mark.slow
def test_steps_of_arrays_see_all_examples_as_in_keras():
    x, y = examples(70)
    trainer, theirs = make_trainer(compiled()), compiled()
    for steps in (1, 3):
        results = trainer.evaluate(x, y, steps=steps, return_dict=True)
        expected = theirs.evaluate(x, y, steps=steps, verbose=0, return_dict=True)
        assert results == pytest.approx(expected, rel=1e-5)
        assert len(trainer.predict(x, steps=steps)) == 70
    assert len(trainer.predict(x, steps=2, batch_size=16)) == 32


SIZES = {
    "features": (mlp, X[:, :5], Y, r"takes features of shape \(6,\) for each example.*has \(5,\)"),
    "axes": (
        mlp,
        X[:, None, :],
        Y,
        r"takes features of shape \(6,\) for each example.*has \(1, 6\)",
    ),
    "inputs": (mlp, [X, X], Y, r"has 1 input, but the data has 2 features"),
    "classes": (mlp, X, Y + 3, r"labels, has the value 6 .*, and the model's output has 4 classes"),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_model_and_data_that_disagree_in_size_fail_before_training(case):
    make, x, y, sentence = SIZES[case]
    with pytest.raises(UserError, match=sentence):
        make_trainer(compiled(make())).fit(x, y)


def test_labels_of_another_size_fail_with_the_sizes_of_the_batch():
    model = compiled(loss="categorical_crossentropy", metrics=[])
    with pytest.raises(UserError, match=r"x \(32, 6\), y \(32, 3\): .*same"):
        make_trainer(model).fit(X, np.eye(3)[Y % 3])


# The scope of the engine


def test_a_model_outside_the_scope_of_the_connected_engine_fails():
    engine = tftpu.connect(virtual_devices=4)
    outside = compiled()
    with pytest.raises(
        UserError, match=r"The model '\w+' was created outside.*with engine\.scope\(\)"
    ):
        tftpu.Trainer(outside)
    with engine.scope(), pytest.raises(UserError, match=r"The model .* was created outside"):
        tftpu.Trainer(outside)
    optimizer = keras.optimizers.Adam()
    with engine.scope():
        model = compiled(optimizer=optimizer)
    with pytest.raises(UserError, match=r"The optimizer 'adam.*' was created outside"):
        tftpu.Trainer(model)


@pytest.mark.slow
def test_a_trainer_may_be_made_and_used_inside_the_scope():
    with tftpu.connect(virtual_devices=4).scope():
        trainer = make_trainer(compiled())
        trainer.fit(X, Y, batch_size=20)
    assert trainer.step == 2


def test_after_connecting_to_one_device_no_scope_is_needed():
    tftpu.connect(virtual_devices=4)
    tftpu.connect(virtual_devices=1)
    tftpu.Trainer(compiled())


# Shapes of batches


def sequences(lengths) -> tf.data.Dataset:
    """Returns batches of 4 sequences; all that tf.data knows is that there are two axes."""
    arrays = [np.full((4, length, 6), 0.1, np.float32) for length in lengths]
    spec = (tf.TensorSpec((None, None, 6)), tf.TensorSpec(None, tf.int32))
    return tf.data.Dataset.from_generator(
        lambda: ((array, np.zeros(4, np.int32)) for array in arrays), output_signature=spec
    )


def recurrent() -> keras.Model:
    return compiled(
        keras.Sequential(
            [
                keras.Input((None, 6)),
                keras.layers.Dense(3),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(4),
            ]
        )
    )


@pytest.mark.slow
def test_unknown_axes_are_those_of_the_first_batch():
    trainer = make_trainer(recurrent())
    trainer.fit(sequences([5, 5]), steps=3, validation_data=sequences([5]))
    trainer.fit(sequences([5, 5]), epochs=2)  # trains again, as nothing is saved
    assert trainer.step == 3 + 4


@pytest.mark.medium
def test_batches_of_changing_shape_fail_with_the_first_one():
    with pytest.raises(UserError, match=r"another shape than the first one, \(4, 5, 6\)"):
        make_trainer(recurrent(), steps_per_loop=1).fit(sequences([5, 7]), steps=2)


@pytest.mark.medium
def test_an_endless_py_dataset_trains_for_steps():
    class Endless(Batches):
        num_batches = None

    trainer = make_trainer(compiled())
    trainer.fit(Endless(40, 8), steps=3)
    assert trainer.step == 3


@pytest.mark.slow
def test_a_timeseries_dataset_trains_as_in_keras():
    series = np.sin(np.arange(60, dtype=np.float32) / 5)[:, None]
    batches = keras.utils.timeseries_dataset_from_array(
        series[:-6], series[6:], sequence_length=6, batch_size=20
    )  # 49 windows: 20 + 20 + 9
    results = []
    for fit in (lambda model: make_trainer(model).fit, lambda model: model.fit):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((6, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = compiled(keras.Sequential(layers), loss="mse", metrics=["mae"])
        history = fit(model)(batches, epochs=2, verbose=0).history
        results.append((history, model.get_weights()))
    (ours, weights), (theirs, expected) = results
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6)
    for a, e in zip(weights, expected):
        np.testing.assert_allclose(a, e, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_last_batch_that_the_devices_cannot_share_trains_as_on_one(microbatches):
    count = 16 + (3 if microbatches == 1 else 2)
    weights = []
    for devices in (1, 2):
        with tftpu.connect(virtual_devices=devices).scope():
            model = compiled()
        trainer = make_trainer(model, gradient_accumulation_steps=microbatches)
        trainer.fit(X[:count], Y[:count], batch_size=16, epochs=2, shuffle=False)
        assert trainer.step == 4
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-7)
