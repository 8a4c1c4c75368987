"""The evaluation step of one replica."""

import functools
from typing import Any

import tensorflow as tf

from tftpu.engines import checks
from tftpu.engines.data.division import Division
from tftpu.engines.objectives import forward
from tftpu.engines.objectives.forward import Forward, ForwardPass, Values
from tftpu.engines.objectives.losses import count_examples, sum_and_count
from tftpu.engines.objectives.sums import EvalSums
from tftpu.engines.tensorflow import internals
from tftpu.engines.tensorflow.state import ModelState
from tftpu.engines.tensorflow.step.accumulator import Accumulator
from tftpu.engines.tensorflow.step.replicas import EXCHANGE
from tftpu.tensors import Nest, Tensor


class EvalStep:
    """The evaluation step of a model, for the strategy in whose scope this object is created.

    Attributes:
        sums: the layout of the vector in `accumulator`.
        accumulator: the sums over batches.
    """

    def __init__(self, state: ModelState):
        self._state = state
        self._passes = [ForwardPass(state, losses, []) for losses in state.losses]
        self.sums = EvalSums(state.losses)
        self.accumulator = Accumulator(self.sums.size, "eval_sums")

    def is_separable(self, batch_spec: Nest) -> bool:
        """Returns whether padding can be left out of the losses and metrics of a batch.

        If not, `evaluate` must run without padding.

        Args:
            batch_spec: the spec of one replica's shard.
        """
        found: list[bool] = []

        def trace(batch):
            runs = self._run(batch, None, self._state.replicas)
            found.extend(run.computed.separable for run in runs)

        graph: Any = tf.function(trace, autograph=False).get_concrete_function(batch_spec).graph
        checks.refuse_outside(internals.list_changed_resources(graph))
        return all(found)

    def evaluate(self, batch: Nest, valid: Tensor | None, shards: int, repeats: int = 1) -> None:
        """Adds one replica's shard of a batch to `accumulator`, in replica context.

        Args:
            batch: the shard, `(x, y)` or `(x, y, sample_weight)`.
            valid: 1.0 for examples and 0.0 for padding, (batch,) float32; None: no padding.
            shards: number of shards that the batch is divided into.
            repeats: number of replicas that evaluate this same shard.
        """
        runs = self._run(batch, valid, shards)
        size = float(count_examples(batch))
        examples = tf.constant(size) if valid is None else tf.reduce_sum(valid)
        batch_size = self._count_examples(examples, size, valid, shards)
        sums, counts = [], []
        for losses, run in zip(self._state.losses, runs):
            for term, elements in zip(losses.terms, run.computed.elements):
                total, count = sum_and_count(term, elements, examples, batch_size)
                sums.append(total)
                counts.append(count)
        added = functools.reduce(tf.add, [run.computed.added for run in runs])
        metrics = [value for run in runs for value in run.metrics]
        vector = self.sums.build_vector(examples, added, sums, counts, metrics)
        self.accumulator.add(vector / repeats)

    def predict(self, x: Nest) -> Nest:
        """Returns the model's output for one replica's shard of the features."""
        outputs, seeds = forward.predict(self._state, x)
        # Lets the next batch draw other random numbers. With several replicas, all draw the same.
        if self._state.replicas == 1:
            for variable, value in seeds:
                variable.value.assign(value)
        return outputs

    def compute_weight_norm(self) -> tf.Tensor:
        """Returns the global norm of the trainable weights, ()."""
        return tf.linalg.global_norm(self._state.read_trained_values())

    def _count_examples(
        self, examples: Tensor, size: float, valid: Tensor | None, shards: int
    ) -> Tensor:
        """Returns the global batch's number of examples, or an upper bound if no loss uses it."""
        summed = any(term.reduction == "sum" for one in self._state.losses for term in one.terms)
        if valid is None or not summed:
            return tf.constant(size * shards)
        context: Any = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, examples)

    def _run(self, batch: Nest, valid: Tensor | None, shards: int) -> list[Forward]:
        values = Values(self._state.select_evaluated_weights())
        division = Division(shards, exchange=EXCHANGE)
        return [
            one.run(batch, values, training=False, division=division, valid=valid)
            for one in self._passes
        ]
