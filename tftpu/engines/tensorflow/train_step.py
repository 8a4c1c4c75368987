"""The train step of one replica: its only definition.

The trainer runs it, preflight compiles it, the tests compare it with plain TensorFlow. Its result
does not depend on how many replicas share the global batch. In order:

1. the forward pass over the replica's share, in microbatches, in one device loop;
2. losses as sums over elements, divided by a divisor of the global batch (`objective.py`);
3. gradients, added up over the microbatches, then once over the replicas;
4. loss unscaling and the overflow test, on the sum, so that all replicas skip or none;
5. clipping of that sum; the optimizer's update, on each replica for itself; the moving average of
   the weights;
6. metrics, added up on each replica, and over replicas when they are read.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import keras_internals
from tftpu.engines.objective import divisor
from tftpu.engines.sums import TrainSums
from tftpu.engines.tensorflow import checks, flops, update
from tftpu.engines.tensorflow.accumulator import Accumulator
from tftpu.engines.tensorflow.eval_step import features_of
from tftpu.engines.tensorflow.forward import Forward, ForwardPass, Values
from tftpu.engines.tensorflow.gradients import Description, ShareGradients
from tftpu.engines.tensorflow.state import ModelState
from tftpu.errors import UserError
from tftpu.tensors import Nest


class TrainStep:
    """The train step of a model, for the strategy in whose scope it is made.

    Making one traces the forward pass, to learn which variables it updates, what it masks, and
    whether XLA can compile it.

    Args:
        state: the variables.
        batch_spec: spec of one replica's share, `(x, y)` or `(x, y, sample_weight)` of
            `tf.TensorSpec`s of static shape.

    Attributes:
        state: the variables.
        statistics: the moving statistics that a step changes.
        divisors: what a microbatch adds to the divisor of each loss; None where it depends on the
            data.
        sums: the layout of what `accumulator` adds up.
        accumulator: the sums over steps.

    Raises:
        UserError: the shape or a layer cannot be trained on.
    """

    def __init__(self, state: ModelState, batch_spec: Nest):
        keras.tree.map_structure(checks.refuse_spec, batch_spec)
        self.state = state
        microbatches = state.options.gradient_accumulation_steps
        self._microbatch = keras.tree.map_structure(
            lambda s: tf.TensorSpec((s.shape[0] // microbatches, *s.shape[1:]), s.dtype), batch_spec
        )
        everything = ForwardPass(state, state.untrained)
        traced = _traced(everything, self._microbatch)
        changed = [
            variable
            for variable, new in zip(everything.statistics, traced.statistics)
            if new is not None
        ]
        _refuse_counters(changed)
        described = _describe(state, traced)
        self.statistics = changed
        self.divisors = described.divisors
        self._gradients = ShareGradients(
            state,
            ForwardPass(state, changed),
            described,
            keras.tree.flatten(self._microbatch)[0].shape[0],
        )
        self.sums = TrainSums(state.objective)
        self.accumulator = Accumulator(self.sums.size, "train_sums")

    @functools.cached_property
    def model_flops(self) -> int:
        """The model FLOPs of a global batch, forward and backward.

        Traces the model as in evaluation: batch statistics do not count as model FLOPs.
        """
        model = self.state.model
        forward = tf.function(lambda x: model(x, training=False), autograph=False)
        ops = checks.graph_ops(forward.get_concrete_function(features_of(self._microbatch)).graph)
        parts = self.state.options.gradient_accumulation_steps * self.state.replicas
        return flops.PASSES * parts * flops.of_forward(ops)

    def train(self, batch: Nest) -> None:
        """Updates the model once, from one replica's share of the global batch.

        Runs in replica context. Losses and metrics are added to `accumulator`.
        """
        context: Any = tf.distribute.get_replica_context()
        state = self.state
        before = [tf.convert_to_tensor(v.value) for v in self.statistics]
        scale = update.loss_scale(state)
        result = self._gradients.compute(context, batch, state.trained_values(), before, scale)
        grads = list(context.all_reduce(tf.distribute.ReduceOp.SUM, result.grads))
        grads = [grad / scale for grad in grads] if scale is not None else grads
        norm = tf.linalg.global_norm(grads)
        finite = tf.math.is_finite(norm)
        limit = state.options.global_clipnorm
        if limit:
            grads = [grad * (limit / tf.maximum(norm, limit)) for grad in grads]
        statistics, metrics, losses = result.statistics, result.metrics, result.losses
        if state.scaler is not None:
            tf.cond(
                finite,
                lambda: update.apply_gradients(state, grads, result.reached),
                lambda: None,
            )
            update.adjust_loss_scale(state.scaler, finite)
            iterations = state.optimizer.iterations
            iterations.assign_add(tf.cast(finite, iterations.dtype))
            # A skipped step must change neither the moving statistics nor what is logged.
            statistics = [tf.where(finite, new, old) for new, old in zip(statistics, before)]
            norm, *losses = (tf.where(finite, value, 0.0) for value in (norm, *losses))
            metrics = [tf.where(finite, value, tf.zeros_like(value)) for value in metrics]
        else:
            with tf.name_scope("optimizer"):
                update.apply_gradients(state, grads, result.reached)
                # A Python number: a tensor would be broadcast from the first replica, a collective.
                state.optimizer.iterations.value.assign_add(1)
        for variable, value in zip(self.statistics, statistics):
            variable.value.assign(value)
        state.step.assign_add(1)
        skipped = 1.0 - tf.cast(finite, tf.float32)
        self.accumulator.add(self.sums.vector(state.replicas, norm, skipped, losses, metrics))

    def synchronise(self) -> None:
        """Sets the moving statistics of all replicas to their mean, in replica context."""
        if self.state.replicas > 1 and self.statistics:
            context: Any = tf.distribute.get_replica_context()
            # Copies, on the replica's device, which collectives between hosts ask for.
            local = [tf.identity(v.value) for v in self.statistics]
            mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, local)
            for variable, value in zip(self.statistics, mean):
                variable.value.assign(value)

    def diverged(self, sums: np.ndarray) -> bool:
        """Returns whether the sums of a device loop show a loss that is no longer finite.

        With a dynamic loss scale single steps may overflow; not all of them at the least scale.
        """
        scaler = self.state.scaler
        if scaler is None:
            return not np.isfinite(sums).all()
        steps, _, skipped = sums[:3]
        return bool(skipped == steps and float(scaler.dynamic_scale.numpy()) <= 1.0)


def _traced(forward: ForwardPass, microbatch: Nest) -> Forward:
    """Traces a forward pass once, and rejects ops that XLA cannot compile."""
    results = []

    def trace(batch):
        results.append(forward.run(batch, Values(), training=True))
        return keras.tree.flatten((results[-1].outputs.y_pred, results[-1].statistics))

    graph = tf.function(trace, autograph=False).get_concrete_function(microbatch).graph
    checks.refuse_host_ops(checks.graph_ops(graph))
    return results[-1]


def _describe(state: ModelState, traced: Forward) -> Description:
    outputs = traced.outputs.y_pred
    return Description(
        output=keras.tree.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), outputs),
        masked=any(keras_internals.keras_mask(t) is not None for t in keras.tree.flatten(outputs)),
        divisors=[
            None if elements.count is not None else divisor(term, elements, state.replicas)
            for term, elements in zip(state.objective.terms, traced.elements)
        ],
    )


def _refuse_counters(changed: list[keras.Variable]) -> None:
    for variable in changed:
        if not tf.as_dtype(variable.dtype).is_floating:
            raise UserError(
                f"The layer variable {variable.path!r} is a {variable.dtype} that changes in "
                "training: replicas would disagree about it. Keep such counts in a metric."
            )
