"""The evaluation step of one replica."""

import keras
import tensorflow as tf

from tftpu.engines.objective import divisor, weighted_sum
from tftpu.engines.sums import EvalSums
from tftpu.engines.tensorflow.accumulator import Accumulator
from tftpu.engines.tensorflow.forward import ForwardPass, Values
from tftpu.engines.tensorflow.state import ModelState
from tftpu.tensors import Nest


class EvalStep:
    """The evaluation step of a model, for the strategy in whose scope it is made.

    Attributes:
        sums: the layout of what `accumulator` adds up.
        accumulator: the sums over batches.
    """

    def __init__(self, state: ModelState):
        self._state = state
        self._forward = ForwardPass(state, [])
        self.sums = EvalSums(state.objective)
        self.accumulator = Accumulator(self.sums.size, "eval_sums")

    def evaluate(self, batch: Nest, valid: tf.Tensor) -> None:
        """Adds one replica's share of a batch to `accumulator`, in replica context.

        Args:
            batch: the share, `(x, y)` or `(x, y, sample_weight)`.
            valid: (batch,) float32, 1.0 for examples and 0.0 for padding.
        """
        values = Values(self._state.evaluated_weights())
        forward = self._forward.run(batch, values, training=False, valid=valid)
        replicas = self._state.replicas
        sums = [weighted_sum(elements) for elements in forward.elements]
        counts = [
            tf.convert_to_tensor(divisor(term, elements, replicas))
            for term, elements in zip(self._state.objective.terms, forward.elements)
        ]
        vector = self.sums.vector(replicas, forward.added, sums, counts, forward.metrics)
        self.accumulator.add(vector)

    def predict(self, x: Nest) -> Nest:
        """Returns the model's output for one replica's share of the features."""
        return self._forward.predict(x)

    def weight_norm(self) -> tf.Tensor:
        """Returns the global norm of the trainable weights, ()."""
        return tf.linalg.global_norm(self._state.trained_values())


def features_of(batch: Nest) -> Nest:
    """Returns the features of a batch."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return x
