"""Losses and training logic of users: as in plain TensorFlow, and the same on four replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tftpu
from tests.support.models.own_losses import (
    BATCH,
    EXAMPLES,
    FEATURES,
    STEPS,
    Encoder,
    Gan,
    contrastive_loss,
    critic_loss,
    generator_loss,
)
from tests.support.models.strategies import relative
from tests.support.models.training import make_trainer
from tftpu.errors import UserError

RNG = np.random.default_rng(5)
X = RNG.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
NOISE = RNG.normal(size=(EXAMPLES, 3)).astype(np.float32)


class Autoencoder(keras.Model):
    """Encodes, adds the given noise, decodes."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.encoder = keras.layers.Dense(6)
        self.decoder = keras.layers.Dense(FEATURES)

    def call(self, inputs):
        x, noise = inputs
        mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
        return self.decoder(mean + ops.exp(0.5 * log_var) * noise), mean, log_var


def vae_loss(model, batch, training):
    x, _ = batch
    decoded, mean, log_var = model(batch, training=training)
    error = ops.sum(ops.square(decoded - x), axis=-1)
    kl = -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=-1)
    return error + 0.1 * kl, {"kl": kl, "error": error}


def batches(count: int = EXAMPLES) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[:count], NOISE[:count])).batch(BATCH)


def values(model) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def engines(replicas: int):
    return tftpu.connect("none", virtual_devices=replicas)


def trained(replicas, make, steps=STEPS, workdir=None, **logic):
    engine = engines(replicas)
    with engine.scope():
        model = make()
        if "loss_fn" in logic:
            model.compile(optimizer="adam")
        given = dict(logic)
        if "objectives" in given:
            given["objectives"] = given["objectives"](model)
        trainer = tftpu.Trainer(
            model, workdir, tftpu.TrainConfig(log_every=1, steps_per_loop=2), **given
        )
    history = trainer.fit(batches(), steps=steps, validation_data=batches(40), verbose=False)
    return trainer, history.history


def by_hand(make, updates, steps=STEPS):
    """Trains in plain TensorFlow; returns the model.

    Args:
        updates: returns (loss function, variables, optimizer, every) for a model.
    """
    model = make()
    data = list(batches().repeat().rebatch(BATCH, drop_remainder=True).take(steps))
    for one in data[:1]:
        for loss_fn, *_ in UPDATED[make]:
            loss_fn(model, one, False)
    parts = updates(model)
    for step, batch in enumerate(data):
        for loss_fn, variables, optimizer, every in parts:
            if step % every:
                continue
            with tf.GradientTape() as tape:
                result = loss_fn(model, batch, True)
                loss = tf.reduce_mean(result[0] if isinstance(result, tuple) else result)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return model


UPDATED = {
    Autoencoder: [(vae_loss,)],
    Gan: [(critic_loss,), (generator_loss,)],
    Encoder: [(contrastive_loss,)],
}


def all_by_adam(loss_fn):
    return lambda model: [(loss_fn, model.trainable_variables, keras.optimizers.Adam(), 1)]


def adversaries(model):
    return [
        (critic_loss, model.critic.trainable_variables, keras.optimizers.Adam(0.01), 1),
        (generator_loss, model.generator.trainable_variables, keras.optimizers.RMSprop(0.02), 3),
    ]


def objectives(model):
    return [
        tftpu.Objective(critic_loss, model.critic, keras.optimizers.Adam(0.01)),
        tftpu.Objective(generator_loss, model.generator, keras.optimizers.RMSprop(0.02), every=3),
    ]


CASES = {
    "vae": (Autoencoder, {"loss_fn": vae_loss}, all_by_adam(vae_loss)),
    "contrastive": (Encoder, {"loss_fn": contrastive_loss}, all_by_adam(contrastive_loss)),
    "gan with a gradient penalty": (Gan, {"objectives": objectives}, adversaries),
}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("case", CASES)
def test_loss_functions_train_as_in_plain_tensorflow(case, replicas):
    make, logic, updates = CASES[case]
    expected = values(by_hand(make, updates))
    trainer, history = trained(replicas, make, **logic)
    assert relative(values(trainer.model), expected) < 2e-6
    assert history["val_loss"]


@pytest.mark.slow
def test_named_values_are_means_over_examples():
    trainer, history = trained(4, Autoencoder, loss_fn=vae_loss, steps=1)
    found = trainer.evaluate(batches(41), return_dict=True)
    loss, named = vae_loss(trainer.model, (X[:41], NOISE[:41]), False)
    expected = {"loss": loss, **named}
    assert found.keys() == expected.keys() <= history.keys()
    for name, each in expected.items():
        assert found[name] == pytest.approx(float(ops.mean(each)), rel=1e-5)


@pytest.mark.slow
def test_objectives_log_their_losses_and_resume(tmp_path):
    whole, _ = trained(1, Gan, objectives=objectives)
    trained(1, Gan, steps=4, workdir=str(tmp_path), objectives=objectives)
    again, history = trained(1, Gan, workdir=str(tmp_path), objectives=objectives)
    np.testing.assert_array_equal(values(again.model), values(whole.model))
    assert {"critic_loss", "generator_loss", "penalty"} <= history.keys()
    slots = [v.numpy() for v in again.executor.variables.groups[1].optimizer.variables]
    assert int(slots[0]) == 2  # of 6 steps, every third


@pytest.mark.medium
def test_the_losses_of_objectives_are_means_over_the_steps_they_are_due():
    engine = engines(1)
    with engine.scope():
        model = Gan()
        parts = [
            tftpu.Objective(critic_loss, model.critic, keras.optimizers.SGD(0.0)),
            tftpu.Objective(generator_loss, model.generator, keras.optimizers.SGD(0.0), every=3),
        ]
        trainer = tftpu.Trainer(model, objectives=parts, options=tftpu.TrainConfig(log_every=6))
    data = tf.data.Dataset.from_tensors((X[:BATCH], NOISE[:BATCH]))
    history = trainer.fit(data, steps=6, verbose=False).history
    expected = float(ops.mean(generator_loss(model, (X[:BATCH], NOISE[:BATCH]), False)))
    assert history["generator_loss"][-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.medium
def test_overflow_of_one_objective_skips_only_its_own_update():
    def overflowing(model, batch, training):
        return generator_loss(model, batch, training) * 1e38 * 1e38

    engine = engines(1)
    with engine.scope():
        model = Gan()
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        parts = [
            tftpu.Objective(critic_loss, model.critic, keras.optimizers.SGD(0.1)),
            tftpu.Objective(overflowing, model.generator, scaled),
        ]
        trainer = tftpu.Trainer(model, objectives=parts)
    before = (
        [v.numpy() for v in model.generator.variables],
        [v.numpy() for v in model.critic.variables],
    )
    trainer.fit(batches(), steps=1, verbose=False)
    assert all((v.numpy() == b).all() for v, b in zip(model.generator.variables, before[0]))
    assert any((v.numpy() != b).any() for v, b in zip(model.critic.variables, before[1]))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_a_compute_loss_of_each_example_is_exact(replicas):
    class Robust(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            del x, sample_weight, training
            return ops.mean(ops.log(ops.cosh(y_pred - y)), axis=-1)

    def make(kind):
        keras.utils.set_random_seed(4)
        model = kind([keras.Input((FEATURES,)), keras.layers.Dense(3)])
        model.compile("adam", loss=None if kind is Robust else "log_cosh", metrics=["mae"])
        return model

    engine = engines(replicas)
    with engine.scope():
        trainer = make_trainer(make(Robust))
    trainer.fit(batches(), steps=STEPS, verbose=False)
    expected = make(keras.Sequential)
    expected.fit(
        batches().repeat().rebatch(BATCH, drop_remainder=True), steps_per_epoch=STEPS, verbose=0
    )
    assert relative(values(trainer.model), values(expected)) < 2e-6
    found = trainer.evaluate(batches(41), return_dict=True)
    kept = expected.evaluate(batches(41), return_dict=True, verbose=0)
    assert found["loss"] == pytest.approx(kept["loss"], rel=1e-5)
    assert found["mae"] == pytest.approx(kept["mae"], rel=1e-5)


@pytest.mark.medium
def test_a_compute_loss_that_is_one_number_warns_and_equals_keras_on_one_device():
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss + 0.1 * ops.mean(ops.square(y_pred))

    def make():
        keras.utils.set_random_seed(4)
        layer = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))
        model = Own([keras.Input((FEATURES,)), layer])
        model.compile("sgd", "mse")
        return model

    model, expected = make(), make()
    data = batches(48)
    with pytest.warns(UserWarning, match="is one number for a whole batch"):
        trainer = make_trainer(model)
        trainer.fit(data, steps=3, verbose=False)
    expected.fit(data, verbose=0)
    assert relative(values(model), values(expected)) < 2e-6
    assert trainer.evaluate(batches(41), return_dict=True)["loss"] == pytest.approx(
        expected.evaluate(batches(41), verbose=0), rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("loss", [keras.losses.Dice(), keras.losses.Tversky()])
def test_losses_of_keras_that_are_one_number_are_those_of_the_whole_batch(loss, replicas):
    def make():
        keras.utils.set_random_seed(4)
        model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(3, activation="sigmoid")]
        )
        model.compile("sgd", loss)
        return model

    labels = (NOISE > 0).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((X, labels)).batch(BATCH)
    expected = make()
    with engines(replicas).scope():
        model = make()
    trainer = make_trainer(model)
    trainer.fit(data.take(3), steps=3, verbose=False)
    expected.fit(data.take(3), verbose=0)
    assert relative(values(model), values(expected)) < 2e-6
    kept = expected.evaluate(data, verbose=0)  # the last batch has 8 of 16 examples
    assert trainer.evaluate(data, return_dict=True)["loss"] == pytest.approx(kept, rel=1e-5)


def test_microbatches_cannot_gather():
    engine = engines(2)
    with engine.scope():
        model = Encoder()
        model.compile(optimizer="sgd")
        trainer = make_trainer_with(model, contrastive_loss, gradient_accumulation_steps=2)
    with pytest.raises(UserError, match="gradient_accumulation_steps=1"):
        trainer.fit(batches(), steps=1)


def make_trainer_with(model, loss_fn, **options):
    return tftpu.Trainer(model, None, tftpu.TrainConfig(**options), loss_fn=loss_fn)


def compiled_encoder(**arguments) -> keras.Model:
    model = Encoder()
    model.compile(**{"optimizer": "sgd", **arguments})
    return model


def _outside(model, batch, training):
    return ops.sum(STRAY(model(batch[0]), training=True), axis=-1)


STRAY = keras.layers.Dropout(0.5, seed=1)

WRONG = {
    "no optimizer": (Encoder, generator_loss, "needs an optimizer"),
    "a compiled loss": (
        lambda: compiled_encoder(loss="mse"),
        generator_loss,
        "was compiled with a loss",
    ),
    "no loss": (compiled_encoder, lambda model, batch, training: None, "returns None"),
    "no function": (compiled_encoder, "mse", "pass a function of"),
    "its own layer": (compiled_encoder, _outside, "not part of the model"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_loss_functions_fail_before_training(case):
    make, loss_fn, sentence = WRONG[case]
    with pytest.raises(UserError, match=sentence):
        make_trainer_with(make(), loss_fn).fit(batches(), steps=1)


@pytest.mark.medium
def test_a_value_that_is_not_finite_ends_no_run():
    def with_nan(model, batch, training):
        loss, values = vae_loss(model, batch, training)
        return loss, {"undefined": values["kl"] * np.nan}

    _, history = trained(1, Autoencoder, steps=2, loss_fn=with_nan)
    assert np.isnan(history["undefined"]).all()
    assert np.isfinite(history["loss"]).all()


@pytest.mark.slow
def test_a_batch_of_any_parts_goes_to_a_loss_function(tmp_path):
    def loss_fn(model, batch, training):
        x, noise, more, images = batch
        return ops.sum(model(x)[:, :3] * noise * more, axis=-1) + ops.mean(images, axis=(1, 2, 3))

    model = compiled_encoder()
    images = np.ones((EXAMPLES, 4, 4, 1), np.float32)
    data = tf.data.Dataset.from_tensor_slices((X, NOISE, NOISE, images)).batch(BATCH)
    trainer = tftpu.Trainer(model, str(tmp_path), loss_fn=loss_fn)
    assert trainer.fit(data, steps=2, validation_data=data, verbose=0).history["val_loss"]
    with pytest.raises(UserError, match=r"has 4 parts, but predict takes .*data\.map\(lambda x, "):
        trainer.predict(data)
    features = data.map(lambda x, *rest: x)
    np.testing.assert_allclose(trainer.predict(features), model.predict(X, verbose=0), rtol=1e-5)
