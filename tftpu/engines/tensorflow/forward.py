"""The pure forward pass of one microbatch: outputs, losses, statistics and metrics.

It runs in a `keras.StatelessScope`, where every variable is a tensor passed in and every update a
tensor returned. That lets microbatches start from the same batch statistics, and lets random
layers draw different numbers on every replica.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tftpu.engines import objective
from tftpu.engines.objective import Elements, Outputs
from tftpu.engines.tensorflow.state import ModelState
from tftpu.tensors import Nest, Tensor


class Values(NamedTuple):
    """Values for the variables of a forward pass; None leaves a group as it is.

    Attributes:
        trainable: of the trainable weights.
        statistics: of the moving statistics.
        seeds: of the seed generators.
        metrics: of the metrics' states; None starts them at zero.
    """

    trainable: list[Tensor] | None = None
    statistics: list[Tensor] | None = None
    seeds: list[Tensor] | None = None
    metrics: list[Tensor] | None = None


class Forward(NamedTuple):
    """The results of one microbatch.

    Attributes:
        outputs: of the model.
        elements: one for each loss.
        added: the sum of the model's own losses, which are means over the microbatch, ().
        statistics: new moving statistics; None where the pass did not change them.
        metrics: new states of the metrics.
    """

    outputs: Outputs
    elements: list[Elements]
    added: Tensor
    statistics: list[Tensor | None]
    metrics: list[Tensor]


class ForwardPass:
    """The forward pass of a model.

    Args:
        state: the variables.
        statistics: the moving statistics that training may change.
    """

    def __init__(self, state: ModelState, statistics: list[keras.Variable]):
        self._state = state
        self._objective = state.objective
        self._model = state.model
        self.statistics = statistics

    def run(
        self, batch: Nest, values: Values, *, training: bool, valid: Tensor | None = None
    ) -> Forward:
        """Computes model, losses and metrics for one microbatch.

        Args:
            batch: `(x, y)` or `(x, y, sample_weight)`.
            values: of the variables.
            training: as for the model.
            valid: (batch,), 1.0 for examples and 0.0 for padding; None: all are examples.
        """
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if values.metrics is None:
            values = values._replace(metrics=self.zero_metrics())
        with self._scope(values) as scope:
            outputs = objective.call(self._model, x, training)
            own = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in scope.losses]
            for variable in self._model.trainable_variables:
                if variable.regularizer is not None:
                    own.append(tf.cast(variable.regularizer(variable.value), tf.float32))
            # Preflight knows the purpose of an instruction by these scopes.
            with tf.name_scope("loss"):
                elements = self._objective.elements(outputs, y, weight, valid)
            with tf.name_scope("metrics"):
                self._objective.update_metrics(y, outputs.y_pred, weight, valid)
            new = [scope.get_current_value(v) for v in self.statistics]
            states = [scope.get_current_value(v) for v in self._objective.metric_variables]
        return Forward(outputs, elements, tf.add_n([tf.zeros(()), *own]), new, states)

    def elements_of_zeros(self, batch: Nest, output: Nest) -> list[Elements]:
        """Returns the losses for outputs of zeros, which have the divisors of the real ones.

        Args:
            batch: one replica's share.
            output: specs of one example's outputs.
        """
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        size = keras.tree.flatten(x)[0].shape[0]
        y_pred = keras.tree.map_structure(lambda s: tf.zeros((size, *s.shape), s.dtype), output)
        return self._objective.elements(Outputs(y_pred, None), y, weight, None)

    def predict(self, x: Nest) -> Nest:
        """Returns the model's output with the weights that evaluation uses."""
        with self._scope(Values(self._state.evaluated_weights())):
            return self._model(x, training=False)

    def zero_metrics(self) -> list[Tensor]:
        """Returns states of the metrics that hold nothing yet."""
        return [tf.zeros(v.shape, v.dtype) for v in self._objective.metric_variables]

    def _scope(self, values: Values) -> Any:
        """Returns a scope in which the variables have the given values."""
        groups = (
            (self._model.trainable_variables, values.trainable),
            (self.statistics, values.statistics),
            (self._state.seed_states, values.seeds),
            (self._objective.metric_variables, values.metrics),
        )
        mapping = [pair for group, given in groups if given for pair in zip(group, given)]
        return keras.StatelessScope(state_mapping=mapping, collect_losses=True)
