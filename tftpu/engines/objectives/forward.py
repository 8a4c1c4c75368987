"""The pure forward pass of one microbatch: outputs, losses, statistics and metrics.

It runs in a `keras.StatelessScope`, which takes the values of variables as tensors and returns
their updates as tensors. Microbatches can therefore start from the same batch statistics, and
random layers can draw different numbers on every replica.
"""

from typing import Any, NamedTuple, Protocol

import keras

from tftpu import layer_internals
from tftpu.blocks.running import running_blocks
from tftpu.config import TrainConfig
from tftpu.engines import keras_internals
from tftpu.engines.data.division import Division, divided
from tftpu.engines.objectives.losses import Computed, Losses, compute_shard_divisor
from tftpu.tensors import Nest, Tensor, ops


class Values(NamedTuple):
    """Values for the variables of a forward pass; None keeps the current values of a group.

    Attributes:
        trainable: the values of the model's trainable weights.
        statistics: the values of the moving statistics.
        seeds: the states of the seed generators.
        metrics: the values of the metrics' states; None starts them at zero.
    """

    trainable: list[Tensor] | None = None
    statistics: list[Tensor] | None = None
    seeds: list[Tensor] | None = None
    metrics: list[Tensor] | None = None


class Forward(NamedTuple):
    """The results of one microbatch.

    Attributes:
        computed: the outputs and the losses.
        statistics: the new or given moving statistics; None for one that was not given and that
            the pass did not change.
        metrics: the new states of the metrics.
        updated: the variables that the pass changed.
        read: the variables that the pass read and that have no value in `Values`.
    """

    computed: Computed
    statistics: list[Tensor | None]
    metrics: list[Tensor]
    updated: list[keras.Variable]
    read: list[keras.Variable]


class ForwardProperties(NamedTuple):
    """Properties of a traced forward pass.

    Attributes:
        output: the outputs of one example as `keras.KerasTensor`s.
        masked: whether an output carries a Keras mask.
        divisors: the global divisor of each term; None where it depends on the data.
    """

    output: Nest
    masked: bool
    divisors: list[float | None]


class Variables(Protocol):
    """The variables of a model as an engine holds them."""

    model: keras.Model
    options: TrainConfig

    @property
    def seed_states(self) -> list[keras.Variable]:
        """The states of all seed generators."""
        ...

    def read_trained_values(self) -> list[Tensor]:
        """Returns the values of the trainable weights."""
        ...

    def select_evaluated_weights(self) -> list[Tensor]:
        """Returns the weights that evaluation uses: the averages where they are kept."""
        ...


class ForwardPass:
    """The forward pass of a model with the losses of one objective.

    Args:
        state: the variables.
        losses: the losses and metrics of the model.
        statistics: the variables that training may change: moving statistics, and weights that a
            layer assigns itself.

    Attributes:
        losses, statistics: the arguments.
    """

    def __init__(self, state: Variables, losses: Losses, statistics: list[keras.Variable]):
        self._state = state
        self.losses = losses
        self._model = state.model
        self.statistics = statistics

    def run(
        self,
        batch: Nest,
        values: Values,
        *,
        training: bool,
        division: Division,
        valid: Tensor | None = None,
    ) -> Forward:
        """Runs the model, its losses and metrics on one microbatch.

        Args:
            batch: `(x, y)` or `(x, y, sample_weight)`, or any batch that a loss function takes.
            values: the values of the variables.
            training: whether the model trains, as for Keras's `call`.
            division: how the global batch is divided.
            valid: 1.0 for examples and 0.0 for padding, (batch,); None: no padding.
        """
        if values.metrics is None:
            values = values._replace(metrics=self.build_zero_metrics())
        means = keras_internals.unscaled_losses()
        options = self._state.options
        remat = options.remat if training else "none"
        blocks = running_blocks(self._model, remat, options.scan)
        with self._build_scope(values) as scope, divided(division), means, blocks:
            computed = self.losses.compute(batch, training, valid, lambda: scope.losses)
            new = [scope.get_current_value(v) for v in self.statistics]
            states = [scope.get_current_value(v) for v in self.losses.metric_variables]
        return Forward(computed, new, states, scope.updated, scope.read)

    def compute_outputs(self, batch: Nest, values: Values | None = None) -> Nest:
        """Returns the results of the forward pass alone, as in evaluation.

        Args:
            batch: see `run`.
            values: the values of the variables; None: their current values.
        """
        blocks = running_blocks(self._model, "none", self._state.options.scan)
        with self._build_scope(values or Values(self._state.read_trained_values())), blocks:
            return self.losses.compute_outputs(batch)

    def build_zero_metrics(self) -> list[Tensor]:
        """Returns the initial states of the metrics, which are zeros."""
        return [ops.zeros(v.shape, v.dtype) for v in self.losses.metric_variables]

    def _build_scope(self, values: Values) -> "RecordingScope":
        """Returns a scope in which the variables have the given values."""
        groups = (
            (self.statistics, values.statistics),
            # Must follow the statistics: a weight in both groups gets the later value.
            (self._model.trainable_variables, values.trainable),
            (self._state.seed_states, values.seeds),
            (self.losses.metric_variables, values.metrics),
        )
        mapping = [pair for group, given in groups if given for pair in zip(group, given)]
        return RecordingScope(mapping)


class RecordingScope(keras.StatelessScope):
    """A `keras.StatelessScope` that collects losses, and records which variables change.

    Args:
        mapping: the values of variables, as for `keras.StatelessScope`.

    Attributes:
        updated: the variables that changed, in the order of their first change.
        read: the variables without a given value that were read.
    """

    def __init__(self, mapping: list[tuple[keras.Variable, Tensor]]):
        super().__init__(state_mapping=mapping, collect_losses=True)
        self.updated: list[Any] = []
        self.read: list[Any] = []

    def get_current_value(self, variable: Any) -> Any:
        """Returns the value that a variable has in the scope, or None."""
        value = super().get_current_value(variable)
        if value is None and not any(variable is known for known in self.read):
            self.read.append(variable)
        return value

    def add_update(self, update: tuple[Any, Tensor]) -> None:
        """Keeps the new value of a variable.

        The gradient of a weight that a layer assigns is taken with respect to its new value, as in
        Keras's step on TensorFlow.
        """
        variable, value = update
        before = self.get_current_value(variable) if variable.trainable else None
        if before is not None:
            value = ops.stop_gradient(value) + (before - ops.stop_gradient(before))
        super().add_update((variable, value))
        if not any(variable is known for known in self.updated):
            self.updated.append(variable)


def describe_pass(traced: Forward, losses: Losses, parts: int) -> ForwardProperties:
    """Returns the properties of a traced forward pass.

    Args:
        traced: the results of one microbatch.
        losses: the losses that the pass computed.
        parts: the number of microbatches in all shards of the global batch.
    """
    outputs = traced.computed.y_pred if traced.computed.y_pred is not None else ()

    def compute_divisor(term, elements):
        if elements.count is not None:
            return None
        summed = term.reduction == "sum" and not elements.is_scalar
        return compute_shard_divisor(term, elements, parts) * parts if not summed else 1.0

    return ForwardProperties(
        keras.tree.map_structure(
            lambda t: keras.KerasTensor(t.shape[1:], keras.backend.standardize_dtype(t.dtype)),
            outputs,
        ),
        any(layer_internals.read_mask(t) is not None for t in keras.tree.flatten(outputs)),
        [compute_divisor(*pair) for pair in zip(losses.terms, traced.computed.elements)],
    )


def predict(state: Variables, x: Nest) -> tuple[Nest, list[tuple[keras.Variable, Tensor]]]:
    """Returns the model's output with the weights that evaluation uses.

    Returns:
        The output, and the new states of seed generators from which the model has drawn.
    """
    pairs = list(zip(state.model.trainable_variables, state.select_evaluated_weights()))
    with RecordingScope(pairs) as scope:
        outputs = keras_internals.call_model(state.model, x, training=False)
    new = [(v, scope.get_current_value(v)) for v in state.seed_states]
    return outputs, [(v, value) for v, value in new if value is not None]
