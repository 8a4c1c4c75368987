"""`train_step`s with a gradient tape, which only TensorFlow runs."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.compatibility.data import normal
from tests.compatibility.fitting import Fit, build_compiled, dense


class Gan(keras.Model):
    """Two networks with two optimizers, in one step."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([keras.Input((5,)), dense(8, "relu"), dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), dense(8, "relu"), dense(5)])
        self.seeds = keras.random.SeedGenerator(7)
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.generator_loss = keras.metrics.Mean(name="generator_loss")

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer

    def call(self, noise):
        return self.generator(noise)

    def train_step(self, real):
        noise = keras.random.normal((ops.shape(real)[0], 3), seed=self.seeds)
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(noise))
            loss = ops.mean(ops.softplus(fake)) + ops.mean(ops.softplus(-self.critic(real)))
        gradients = tape.gradient(loss, self.critic.trainable_weights)
        self.critic_optimizer.apply_gradients(zip(gradients, self.critic.trainable_weights))
        self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.softplus(-self.critic(self.generator(noise))))
        gradients = tape.gradient(loss, self.generator.trainable_weights)
        self.generator_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights))
        self.generator_loss.update_state(loss)
        return {m.name: m.result() for m in (self.critic_loss, self.generator_loss)}


class Accumulating(keras.Model):
    """Gradients of two batches in one update, kept in variables between the steps."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1)

    def call(self, x):
        return self.layer(x)

    def build(self, shape):
        self.layer.build(shape)
        self.sums = [
            tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_weights
        ]
        self.turn = tf.Variable(0, trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_weights)):
            total.assign_add(gradient / 2)
        self.turn.assign_add(1)
        tf.cond(self.turn % 2 == 0, self._update, lambda: None)
        return {"loss": loss}

    def _update(self):
        self.optimizer.apply_gradients(zip(self.sums, self.trainable_weights))
        for total in self.sums:
            total.assign(tf.zeros_like(total))


class SharpnessAware(keras.Model):
    """Sharpness-aware minimization: the gradient at a point uphill of the weights."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        uphill = []
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, self.trainable_weights)
        scale = 0.05 / (tf.linalg.global_norm(gradients) + 1e-12)
        for gradient, weight in zip(gradients, self.trainable_weights):
            uphill.append(gradient * scale)
            weight.assign_add(uphill[-1])
        with tf.GradientTape() as tape:
            there = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(there, self.trainable_weights)
        for moved, weight in zip(uphill, self.trainable_weights):
            weight.assign_sub(moved)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}


class MeanTeacher(keras.Model):
    """A student, and a teacher whose weights follow the student's slowly."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = dense(2), dense(2)
        self.teacher.trainable = False

    def call(self, x):
        self.teacher(x)
        return self.student(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            student = self.student(x + 0.1)
            loss = tf.reduce_mean((student - self.teacher(x) - x[:, :2]) ** 2)
        weights = self.student.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        for slow, fast in zip(self.teacher.weights, self.student.weights):
            slow.assign(0.9 * slow + 0.1 * fast)
        return {"loss": loss}


class Queue(keras.Model):
    """Contrast with the keys of earlier batches, which a queue holds."""

    def __init__(self):
        super().__init__()
        self.layer = dense(3)
        self.queue = self.add_weight(shape=(32, 3), initializer="zeros", trainable=False)

    def call(self, x):
        return self.layer(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            keys = self.layer(x)
            loss = tf.reduce_mean(tf.nn.softplus(keys @ tf.transpose(self.queue)))
            loss -= tf.reduce_mean(keys)
        weights = self.layer.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.queue.assign(tf.concat([keys, self.queue[: 32 - keys.shape[0]]], 0))
        return {"loss": loss}


class Vae(keras.Model):
    """A variational autoencoder that draws its noise in the step."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([dense(8, "tanh"), dense(4)])
        self.decoder = keras.Sequential([dense(8, "tanh"), dense(5)])
        self.sample = layers.GaussianNoise(1.0, seed=3)
        self.total = keras.metrics.Mean(name="loss")
        self.kl = keras.metrics.Mean(name="kl")

    def call(self, x, training=False):
        mean, spread = ops.split(self.encoder(x), 2, axis=-1)
        drawn = mean + ops.exp(0.5 * spread) * self.sample(0 * mean, training=training)
        return self.decoder(drawn), mean, spread

    def train_step(self, x):
        with tf.GradientTape() as tape:
            decoded, mean, spread = self(x, training=True)
            error = ops.mean(ops.sum((decoded - x) ** 2, -1))
            kl = -0.5 * ops.mean(ops.sum(1 + spread - mean**2 - ops.exp(spread), -1))
            loss = error + kl
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.total.update_state(loss)
        self.kl.update_state(kl)
        return {"loss": self.total.result(), "kl": self.kl.result()}


def _gan():
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return model


X = normal(5)
PAIRS = {"x": X, "y": X[:, :1], "batch_size": 16, "epochs": 2, "shuffle": False}
ALONE = {"x": X, "batch_size": 16, "epochs": 2, "shuffle": False}
FITS = {
    "gan": Fit(_gan, lambda: ALONE, one_device=True, on_jax=False),
    "accumulating": Fit(build_compiled(Accumulating), lambda: PAIRS, one_device=True, on_jax=False),
    "sharpness_aware": Fit(
        build_compiled(SharpnessAware, loss="mse"), lambda: PAIRS, one_device=True, on_jax=False
    ),
    "mean_teacher": Fit(build_compiled(MeanTeacher), lambda: ALONE, one_device=True, on_jax=False),
    "queue": Fit(build_compiled(Queue), lambda: ALONE, one_device=True, on_jax=False),
    "vae": Fit(build_compiled(Vae), lambda: ALONE, one_device=True, on_jax=False),
}
