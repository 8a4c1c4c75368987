"""The step of one objective: gradients, their sum over replicas, clipping, update."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tftpu import sharding
from tftpu.engines import checks
from tftpu.engines.data.division import Division
from tftpu.engines.objectives.forward import Forward, ForwardPass, Values, describe_pass
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.objectives.sums import GroupSums
from tftpu.engines.origins import Origin
from tftpu.engines.tensorflow import internals, xla_ops
from tftpu.engines.tensorflow.lowering import flops
from tftpu.engines.tensorflow.state import ModelState
from tftpu.engines.tensorflow.step import update
from tftpu.engines.tensorflow.step.gradients import ShardGradients, ShardResult
from tftpu.tensors import Nest, Tensor


class ObjectiveResult(NamedTuple):
    """The results of one objective in one step, on one replica.

    Attributes:
        sums: this replica's summands of this step in the sums over steps.
        norm: the global norm of the gradient, (); 0 if a dynamic loss scale skips the update.
        finite: whether the gradient was finite, () bool; if not, a dynamic loss scale skips the
            update.
        metrics: the states of the metrics for this replica's shard.
    """

    sums: GroupSums
    norm: Tensor
    finite: Tensor
    metrics: list[Tensor]


class ObjectiveStep:
    """The step of one objective, for the strategy in whose scope this object is created.

    Args:
        state: the variables.
        index: the index of the objective.
        microbatch: spec of a microbatch.
        division: the division of the global batch; without an exchange, each replica computes the
            whole batch.

    Attributes:
        statistics: the moving statistics that the step changes, and the weights that layers assign.
        forward: the forward pass, which returns new values of `statistics`.
        divisors: the global divisor of each term; None where it depends on the data.

    Raises:
        UserError: the objective cannot be trained.
    """

    def __init__(self, state: ModelState, index: int, microbatch: Nest, division: Division):
        self._state = state
        self._repeats = state.replicas // division.shards
        self._group = state.groups[index]
        losses, untrained = self._group.losses, state.list_untrained()
        everything = ForwardPass(state, losses, [*untrained, *state.model.trainable_variables])
        traced = _trace_forward(everything, state, microbatch, division)
        checks.refuse_updates(traced.updated, state.model, untrained, state.seed_states)
        checks.warn_of_means(self._group, traced.computed)
        updated = {id(v) for v in traced.updated}
        self.statistics = [v for v in everything.statistics if id(v) in updated]
        self.forward = ForwardPass(state, losses, self.statistics)
        described = describe_pass(traced, self._group.losses, division.parts)
        self.divisors = described.divisors
        examples = count_examples(microbatch)
        self._gradients = ShardGradients(state, index, self.forward, described, examples, division)

    def compute_gradients(self, context: Any, batch: Nest) -> ShardResult:
        """Returns gradients, summed over replicas, at the present values of the variables.

        Args:
            context: the replica context.
            batch: one replica's shard of the global batch.
        """
        before = [tf.convert_to_tensor(v.value) for v in self.statistics]
        scale = update.read_loss_scale(self._group)
        values = self._state.read_trained_values()
        result = self._gradients.compute(context, batch, values, before, scale)
        grads = list(context.all_reduce(tf.distribute.ReduceOp.SUM, result.grads))
        grads = [grad / scale for grad in grads] if scale is not None else grads
        if self._repeats == 1:
            return result._replace(grads=grads)
        return result._replace(
            grads=[grad / self._repeats for grad in grads],
            metrics=[value / self._repeats for value in result.metrics],
            losses=[value / self._repeats for value in result.losses],
        )

    def update(self, result: ShardResult) -> ObjectiveResult:
        """Updates the objective's variables once, in replica context.

        Args:
            result: the result of `compute_gradients`.
        """
        state, group, grads = self._state, self._group, result.grads
        norm = tf.linalg.global_norm(grads)
        finite = tf.math.is_finite(norm)
        limit = state.options.global_clipnorm
        if limit:
            grads = [grad * (limit / tf.maximum(norm, limit)) for grad in grads]
        statistics, metrics, losses = result.statistics, result.metrics, result.losses
        taken = tf.ones(())
        if group.scaler is not None:
            # A skipped step must change neither the moving statistics nor the logged values.
            before = [tf.convert_to_tensor(v.value) for v in self.statistics]
            statistics = [tf.where(finite, new, old) for new, old in zip(statistics, before)]
        # Assigned before the update, because the update also changes weights that layers assign.
        for variable, value in zip(self.statistics, statistics):
            variable.value.assign(value)
        if group.scaler is not None:
            tf.cond(
                finite,
                lambda: update.apply_gradients(group, grads, result.reached),
                lambda: None,
            )
            update.adjust_loss_scale(group.scaler, finite)
            iterations = group.optimizer.iterations
            iterations.assign_add(tf.cast(finite, iterations.dtype))
            norm, *losses = (tf.where(finite, value, 0.0) for value in (norm, *losses))
            metrics = [tf.where(finite, value, tf.zeros_like(value)) for value in metrics]
            taken = tf.cast(finite, tf.float32)
        else:
            with tf.name_scope("optimizer"):
                update.apply_gradients(group, grads, result.reached)
                # A Python number, because a collective would broadcast a tensor from the first
                # replica.
                group.optimizer.iterations.value.assign_add(1)
        return ObjectiveResult(GroupSums(taken, losses), norm, finite, metrics)

    def count_flops(self, microbatch: Nest) -> int:
        """Returns the model FLOPs of a microbatch, forward and backward.

        Args:
            microbatch: the spec of a microbatch.
        """
        variables = self._state.model.trainable_variables
        own = {id(v) for v in self._group.variables}
        traced = tf.function(
            lambda batch, values: self.forward.compute_outputs(batch, Values(values)),
            autograph=False,
        )
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
        graph: Any = traced.get_concrete_function(microbatch, specs).graph
        data = [Origin.DATA] * len(keras.tree.flatten(microbatch))
        of_variables = [Origin.TRAINED if id(v) in own else Origin.FIXED for v in variables]
        captured = [Origin.FIXED] * (len(graph.inputs) - len(data) - len(variables))
        return flops.count_step_flops(graph, [*data, *of_variables, *captured])

    def create_idle_sums(self) -> GroupSums:
        """Returns the sums of a step in which the objective is not due."""
        zero = tf.zeros(())
        return GroupSums(zero, [zero] * (1 + len(self._group.losses.terms)))


def _trace_forward(
    forward: ForwardPass, state: ModelState, microbatch: Nest, division: Division
) -> Forward:
    """Traces a forward pass, and checks what it assigns and, for a TPU, that XLA can compile it."""
    results = []

    def trace(batch, seeds):
        # Regularizers read the weights from the `StatelessScope` of the forward pass.
        values = Values(state.read_trained_values(), seeds=seeds)
        results.append(forward.run(batch, values, training=True, division=division))
        computed = results[-1].computed
        return keras.tree.flatten((computed.elements, computed.added, results[-1].statistics))

    traced: Any = tf.function(trace, autograph=False)
    seeds = [tf.TensorSpec(v.shape, v.dtype) for v in state.seed_states]
    graph = traced.get_concrete_function(microbatch, seeds).graph
    checks.refuse_outside(internals.list_changed_resources(graph))
    if sharding.get_platform() == "tpu":
        xla_ops.check_ops(xla_ops.list_graph_ops(graph))
    updated = {id(v) for v in results[-1].updated}
    # The inputs that differ between replicas.
    given = graph.inputs[: len(keras.tree.flatten(microbatch)) + len(seeds)]
    for variable, value in zip(forward.statistics, results[-1].statistics):
        if not (variable.trainable and id(variable) in updated and division.parts > 1):
            continue
        if xla_ops.is_computed_from(value, given) or xla_ops.is_drawn(value):
            checks.refuse_assigned(variable)
    return results[-1]
