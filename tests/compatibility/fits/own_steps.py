"""Models with a `train_step` or `test_step` of their own, for the backend that runs."""

import keras
from keras import layers, ops

from tests.compatibility.data import normal
from tests.compatibility.fitting import Fit, build_compiled, dense

if keras.backend.backend() == "jax":
    import jax
else:
    import tensorflow as tf


class _OnePrediction(keras.Model):
    """A model whose step has one loss of `self(x)`: written for both backends."""

    def loss_of(self, x, y, y_pred, weight):
        raise NotImplementedError

    def measure(self, y, y_pred, loss):
        raise NotImplementedError

    def take_gradients(self, gradients):
        return gradients

    if keras.backend.backend() == "jax":

        def compute_loss_and_updates(self, trainable, untrained, x, y, weight):
            y_pred, untrained = self.stateless_call(trainable, untrained, x, training=True)
            return self.loss_of(x, y, y_pred, weight), (y_pred, untrained)

        def train_step(self, state, data):
            trainable, untrained, slots, states = state
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            differentiate = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
            (loss, (y_pred, untrained)), gradients = differentiate(
                trainable, untrained, x, y, weight
            )
            gradients = self.take_gradients(gradients)
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
            mapping = list(zip(self.metrics_variables, states))
            with keras.StatelessScope(mapping) as scope:
                logs = self.measure(y, y_pred, loss)
                states = [scope.get_current_value(v) for v in self.metrics_variables]
            return logs, (trainable, untrained, slots, states)

    else:

        def train_step(self, data):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.loss_of(x, y, y_pred, weight)
            gradients = self.take_gradients(tape.gradient(loss, self.trainable_weights))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
            return self.measure(y, y_pred, loss)


class OwnTrackers(_OnePrediction):
    """Loss and error in metrics that the model holds, as in the guide to customizing `fit`."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x, training=False):
        return self.layer(x)

    @property
    def metrics(self):
        return [self.loss_tracker, self.error]

    def loss_of(self, x, y, y_pred, weight):
        return ops.mean(ops.square(y - y_pred))

    def measure(self, y, y_pred, loss):
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class CompiledInside(_OnePrediction):
    """The compiled loss and metrics, called in a `train_step`, with sample weights."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1)

    def call(self, x, training=False):
        return self.layer(x)

    def loss_of(self, x, y, y_pred, weight):
        return self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)

    def measure(self, y, y_pred, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class ClippedSigns(OwnTrackers):
    """Gradients that are replaced by their signs before the update."""

    def take_gradients(self, gradients):
        return [ops.sign(gradient) for gradient in gradients]


class InBatchContrast(OwnTrackers):
    """A loss of all pairs of a batch: each row is compared with all others."""

    def loss_of(self, x, y, y_pred, weight):
        scores = ops.matmul(y_pred, ops.transpose(y_pred)) * 0.1
        return -ops.mean(ops.diagonal(ops.log_softmax(scores, axis=-1))) + ops.mean(
            ops.square(y - y_pred)
        )


class BatchWide(OwnTrackers):
    """Batch normalization in a `train_step`: its statistics are those of the whole batch."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, x, training=False):
        return self.layer(self.norm(x, training=training))


class WithTestStep(keras.Model):
    """Keras's training, and a `test_step` that also measures the largest error."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1)
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, x, training=False):
        return self.layer(x)

    if keras.backend.backend() == "jax":

        def test_step(self, state, data):
            trainable, untrained, states = state
            x, y = data
            y_pred, untrained = self.stateless_call(trainable, untrained, x, training=False)
            with keras.StatelessScope(list(zip(self.metrics_variables, states))) as scope:
                self.largest.update_state(ops.max(ops.abs(y - y_pred)))
                states = [scope.get_current_value(v) for v in self.metrics_variables]
                logs = {"largest": self.largest.result()}
            return logs, (trainable, untrained, states)

    else:

        def test_step(self, data):
            x, y = data
            self.largest.update_state(ops.max(ops.abs(y - self(x, training=False))))
            return {"largest": self.largest.result()}


X = normal(5)
Y = X[:, :1] * 2 - 1
WHOLE = {"x": X, "y": Y, "batch_size": 16, "epochs": 2, "shuffle": False}
WEIGHT = abs(normal(seed=3))
COMPILED = {"loss": "mse", "metrics": ["mae"]}
FITS = {
    "own_trackers": Fit(build_compiled(OwnTrackers), lambda: WHOLE, one_device=True),
    "compiled_inside": Fit(
        build_compiled(CompiledInside, **COMPILED),
        lambda: {**WHOLE, "sample_weight": WEIGHT},
        one_device=True,
    ),
    "clipped_signs": Fit(build_compiled(ClippedSigns), lambda: WHOLE, one_device=True),
    "in_batch_contrast": Fit(build_compiled(InBatchContrast), lambda: WHOLE, one_device=True),
    "batch_wide": Fit(build_compiled(BatchWide), lambda: WHOLE, one_device=True),
    "with_test_step": Fit(
        build_compiled(WithTestStep, loss="mse"),
        lambda: {**WHOLE, "validation_data": (X[:24], Y[:24])},
        one_device=True,
    ),
}
