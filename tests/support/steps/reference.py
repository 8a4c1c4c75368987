"""A train step in plain TensorFlow: one device, the full batch, no code of tftpu.

The tests compare tftpu's train step with it. The optimizers are written from their papers.
"""

import dataclasses

import numpy as np
import tensorflow as tf

LEARNING_RATE = 0.05
WEIGHT_DECAY = 0.02
EMA = 0.9


@dataclasses.dataclass
class Reference:
    """A trainer that returns weights, loss and accuracy of each step on one device.

    Args:
        forward: computes logits from weights and features.
        weights: initial values of the weights.
        optimizer: "sgd", "adamw", "lamb" or "lars".
        global_clipnorm: largest norm of the whole gradient, or None.
    """

    forward: object
    weights: list[np.ndarray]
    optimizer: str
    global_clipnorm: float | None

    def run(self, batches: list[tuple]) -> dict:
        """Trains on batches of (x, y, weight or None); returns weights, losses and accuracies."""
        weights = [tf.constant(w) for w in self.weights]
        ema = [tf.identity(w) for w in weights]
        first = [tf.zeros_like(w) for w in weights]
        second = [tf.zeros_like(w) for w in weights]
        losses, accuracies = [], []
        for number, (x, y, w) in enumerate(batches, 1):
            w = tf.ones(len(y)) if w is None else tf.constant(w)
            with tf.GradientTape() as tape:
                tape.watch(weights)
                logits = self.forward(weights, tf.constant(x))
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                loss = tf.reduce_sum(each * w) / tf.reduce_sum(w)
            grads = tape.gradient(loss, weights)
            if self.global_clipnorm is not None:
                norm = tf.sqrt(sum(tf.reduce_sum(g * g) for g in grads))
                grads = [g * tf.minimum(1.0, self.global_clipnorm / norm) for g in grads]
            right = tf.cast(tf.argmax(logits, -1) == y, tf.float32)
            losses.append(float(loss))
            accuracies.append(float(tf.reduce_sum(right * w) / tf.reduce_sum(w)))
            update = getattr(self, f"_{self.optimizer}")
            stepped = [update(*each, number) for each in zip(weights, grads, first, second)]
            weights, first, second = (list(group) for group in zip(*stepped))
            ema = [EMA * e + (1 - EMA) * w for e, w in zip(ema, weights)]
        return {
            "weights": [w.numpy() for w in weights],
            "ema": [e.numpy() for e in ema],
            "losses": losses,
            "accuracies": accuracies,
        }

    def _sgd(self, w, g, m, v, t):
        m = 0.9 * m - LEARNING_RATE * g
        return w + m, m, v

    def _adamw(self, w, g, m, v, t):
        decay = WEIGHT_DECAY if len(w.shape) > 1 else 0.0  # biases are left out
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        # Kingma & Ba 2014, end of section 2: epsilon beside the uncorrected second moment.
        rate = LEARNING_RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        return w - LEARNING_RATE * decay * w - rate * m / (tf.sqrt(v) + 1e-7), m, v

    def _lamb(self, w, g, m, v, t):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        update = (m / (1 - 0.9**t)) / (tf.sqrt(v / (1 - 0.999**t)) + 1e-7)
        trust = tf.norm(w) / tf.norm(update) if tf.norm(w) > 0 else 1.0
        return w - LEARNING_RATE * trust * update, m, v

    def _lars(self, w, g, m, v, t):
        if len(w.shape) > 1:
            trust = 0.02 * tf.norm(w) / (tf.norm(g) + WEIGHT_DECAY * tf.norm(w))
            g = trust * (g + WEIGHT_DECAY * w)
        m = 0.9 * m + LEARNING_RATE * g
        return w - m, m, v
