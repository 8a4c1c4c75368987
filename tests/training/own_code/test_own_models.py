"""Models as users bring them train as in Keras, and the same on four replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp, relative
from tests.support.models.training import compiled, data, examples, make_trainer


def several_inputs_and_outputs() -> tuple[keras.Model, tf.data.Dataset]:
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    both = keras.layers.Concatenate()([left, right])
    kind = keras.layers.Dense(4, name="kind")(both)
    size = keras.layers.Dense(1, name="size")(both)
    model = keras.Model({"left": left, "right": right}, {"kind": kind, "size": size})
    model.compile(
        "sgd",
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    x, y = examples()
    features = {"left": x, "right": x[::-1].copy()}
    labels = {"kind": y, "size": x[:, :1]}
    return model, tf.data.Dataset.from_tensor_slices((features, labels)).batch(16)


def subclassed_with_added_loss() -> tuple[keras.Model, tf.data.Dataset]:
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.01))
            self.out = keras.layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.02))

        def call(self, x):
            h = self.hidden(x)
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(h)))
            return self.out(h)

    return compiled(Own()), data()


def frozen_layers() -> tuple[keras.Model, tf.data.Dataset]:
    model = mlp()
    model.layers[0].trainable = False
    return compiled(model), data()


def masked_sequences() -> tuple[keras.Model, tf.data.Dataset]:
    tokens = np.random.default_rng(0).integers(1, 9, (96, 7))
    for row, length in enumerate(np.random.default_rng(1).integers(1, 8, 96)):
        tokens[row, length:] = 0
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            keras.layers.Embedding(10, 5, mask_zero=True),
            keras.layers.Dense(4),
        ]
    )
    return compiled(model), tf.data.Dataset.from_tensor_slices(
        (tokens.astype(np.int32), tokens % 4)
    ).batch(16)


def speech() -> tuple[keras.Model, tf.data.Dataset]:
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((20, 5)), keras.layers.Dense(6)])
    sounds = rng.normal(size=(96, 20, 5)).astype(np.float32)
    labels = rng.integers(1, 6, (96, 4))
    model.compile("sgd", keras.losses.CTC())
    return model, tf.data.Dataset.from_tensor_slices((sounds, labels)).batch(16)


def an_application() -> tuple[keras.Model, tf.data.Dataset]:
    """Returns a model without dropout, whose masks differ between Keras and tftpu, and its data."""
    model = keras.applications.MobileNetV3Small(
        input_shape=(32, 32, 3), weights=None, classes=4, dropout_rate=0.0
    )
    loss = keras.losses.SparseCategoricalCrossentropy()
    images = np.random.default_rng(0).uniform(0, 255, (16, 32, 32, 3)).astype(np.float32)
    labels = np.arange(16) % 4
    return compiled(model, loss=loss), tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)


def from_keras_hub() -> tuple[keras.Model, tf.data.Dataset]:
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=6,
        dropout=0.0,
    )
    model = keras_hub.models.BertTextClassifier(
        backbone=backbone, num_classes=4, preprocessor=None, dropout=0.0
    )
    tokens = np.random.default_rng(0).integers(0, 30, (96, 6)).astype(np.int32)
    features = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": np.ones_like(tokens),
    }
    batches = tf.data.Dataset.from_tensor_slices((features, tokens[:, 0] % 4)).batch(16)
    return compiled(model), batches


@pytest.mark.slow
@pytest.mark.parametrize(
    "bring",
    [
        several_inputs_and_outputs,
        subclassed_with_added_loss,
        frozen_layers,
        pytest.param(masked_sequences, marks=pytest.mark.slow),
        pytest.param(speech, marks=pytest.mark.slow),
        pytest.param(an_application, marks=pytest.mark.slow),
        pytest.param(from_keras_hub, marks=pytest.mark.slow),
    ],
)
def test_users_models_train_as_in_keras_and_the_same_on_four_replicas(bring):
    steps = 2
    keras.utils.set_random_seed(0)
    theirs, batches = bring()
    theirs(next(iter(batches))[0])
    start = theirs.get_weights()
    theirs_history = theirs.fit(batches.take(steps), verbose=0).history
    for count in (1, 4):
        if bring is an_application and count == 4:
            continue  # its batch normalisation is Keras's, per replica by definition
        with tftpu.connect(virtual_devices=count).scope():
            ours, _ = bring()
            ours(next(iter(batches))[0])
            ours.set_weights(start)
        history = make_trainer(ours).fit(batches, steps=steps).history
        for a, e, s in zip(ours.get_weights(), theirs.get_weights(), start):
            # Weights that should not move at all (a bias before a norm) move only by rounding.
            assert relative(a, e) < 2e-5 or np.abs(a - s).max() < 1e-7
        for name, values in theirs_history.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
        # The last batch is smaller than the others, and not divisible.
        last = batches.unbatch().take(23).batch(16)
        trained = make_trainer(ours).evaluate(last, return_dict=True)
        assert trained.keys() == theirs.evaluate(last, return_dict=True, verbose=0).keys()


@pytest.mark.medium
def test_one_batch_is_predicted_with_named_inputs_and_outputs_on_two_replicas():
    with tftpu.connect(virtual_devices=2).scope():
        model, batches = several_inputs_and_outputs()
    trainer = make_trainer(model)
    trainer.evaluate(batches, return_dict=True)
    features = {name: values[:3] for name, values in next(iter(batches))[0].items()}
    found = trainer.executor.predict_batch(features)
    for name, expected in model(features).items():
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-6)
