"""The evaluation step: losses and metrics of a whole batch, and predictions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tftpu.engines import checks, keras_internals
from tftpu.engines.data.division import Division
from tftpu.engines.jax.state import JaxState, StateValues
from tftpu.engines.objectives import forward
from tftpu.engines.objectives.forward import ForwardPass, RecordingScope
from tftpu.engines.objectives.losses import count_examples, sum_and_count
from tftpu.engines.objectives.sums import EvalSums
from tftpu.tensors import Nest, Tensor


class EvalStep:
    """The evaluation step of a model on a mesh.

    Args:
        state: the variables.

    Attributes:
        sums: the layout of the sums over batches.
    """

    def __init__(self, state: JaxState):
        self._state = state
        optimizers = [v for group in state.groups for v in group.optimizer.variables]
        # User-defined losses and layers may read these variables. They are arguments of the
        # program, because a compiled program would otherwise keep their first values.
        self._untrained = [*state.untrained, *optimizers]
        self._passes = [ForwardPass(state, losses, self._untrained) for losses in state.losses]
        self.sums = EvalSums(state.losses)

    def is_separable(self, batch: Nest) -> bool:
        """Returns whether padding can be left out of the losses and metrics of a batch.

        Args:
            batch: the shapes of a batch as `jax.ShapeDtypeStruct`s.
        """
        found: list[bool] = []

        def trace(values, batch):
            runs = self._run(values, batch, None)
            found.extend(run.computed.separable for run in runs)

        jax.eval_shape(trace, self.read_values(), batch)
        return all(found)

    def read_values(self) -> StateValues:
        """Returns the values that evaluation uses, with the weights' averages if there are any."""
        state = self._state
        untrained = [v.value for v in self._untrained]
        return StateValues(state.select_evaluated_weights(), untrained, [], [], [])

    def evaluate(
        self, values: StateValues, sums: Tensor, batch: Nest, valid: Tensor | None
    ) -> Tensor:
        """Adds the sums of a batch to the given sums.

        Args:
            values: the values that evaluation uses.
            sums: the sums over earlier batches, (size,) float32.
            batch: `(x, y)` or `(x, y, sample_weight)`.
            valid: 1.0 for examples and 0.0 for padding, (batch,) float32; None: no padding.
        """
        runs = self._run(values, batch, valid)
        examples = jnp.asarray(float(count_examples(batch))) if valid is None else jnp.sum(valid)
        totals, counts = [], []
        for losses, run in zip(self._state.losses, runs):
            for term, elements in zip(losses.terms, run.computed.elements):
                total, count = sum_and_count(term, elements, examples, examples)
                totals.append(total)
                counts.append(count)
        added = sum(run.computed.added for run in runs)
        metrics = [value for run in runs for value in run.metrics]
        return sums + self.sums.build_vector(examples, added, totals, counts, metrics)

    def check_metrics(self, first: Callable[[], Nest]) -> None:
        """Raises `OwnStepsNeeded` for a metric whose states cannot be added up over batches.

        Keras's own metrics consist of sums and counts. This tests other metrics on a batch.

        Args:
            first: a function that returns the first batch of the data; called only to test metrics.
        """
        for one in self._passes:
            if not one.losses.unknown_metrics:
                continue

            def run_twice(values, batch, one=one):
                given = forward.Values(values.trainable, values.untrained)
                before = one.run(batch, given, training=False, division=Division()).metrics
                given = given._replace(metrics=before)
                return before, one.run(batch, given, training=False, division=Division()).metrics

            names = [v.path for v in one.losses.metric_variables]
            checks.refuse_states(names, *jax.jit(run_twice)(self.read_values(), first()))

    def predict(self, values: StateValues, seeds: list[Any], x: Nest) -> tuple[Nest, list[Any]]:
        """Returns the model's output for a batch of features, and the new seed states.

        Args:
            values: the values that evaluation uses.
            seeds: the states of the seed generators.
            x: the features.
        """
        model = self._state.model
        pairs = [
            *zip(model.trainable_variables, values.trainable),
            *zip(self._untrained, values.untrained),
            *zip(self._state.seed_states, seeds),
        ]
        with self._state.gathering.reading(), RecordingScope(pairs) as scope:
            outputs = keras_internals.call_model(model, x, training=False)
            return outputs, [scope.get_current_value(v) for v in self._state.seed_states]

    def _run(self, values: StateValues, batch: Nest, valid: Tensor | None) -> list[forward.Forward]:
        given = forward.Values(values.trainable, values.untrained)
        with self._state.gathering.reading():
            return [
                one.run(batch, given, training=False, division=Division(), valid=valid)
                for one in self._passes
            ]
