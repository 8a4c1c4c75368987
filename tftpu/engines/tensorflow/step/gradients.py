"""Computes the gradients of one replica's shard of a global batch, in microbatches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tftpu.engines.checks import refuse_unreached
from tftpu.engines.data.division import Division
from tftpu.engines.objectives.compiled import CompiledLosses
from tftpu.engines.objectives.forward import Forward, ForwardPass, ForwardProperties, Values
from tftpu.engines.objectives.losses import compute_shard_divisor, sum_losses
from tftpu.engines.tensorflow.state import ModelState
from tftpu.tensors import Nest, Tensor

Context = Any  # tf.distribute.ReplicaContext


class ShardResult(NamedTuple):
    """The results of one shard.

    Attributes:
        grads: the gradient with respect to each of the objective's variables; zeros if the loss
            does not depend on a variable.
        reached: whether the loss depends on each variable.
        statistics: new moving statistics, averaged over the microbatches.
        metrics: the states of the metrics for this shard.
        losses: this shard's contribution to the loss, and to each of its terms.
    """

    grads: list[Tensor]
    reached: list[bool]
    statistics: list[Tensor]
    metrics: list[Tensor]
    losses: list[Tensor]


class ShardGradients:
    """The computation of losses and gradients of one replica's shard, in replica context.

    Args:
        state: the variables.
        group: the index of the objective.
        forward: the forward pass of the objective.
        described: the pass's outputs and divisors, and whether it has masks.
        examples: number of examples of a microbatch.
        division: the division of the global batch into shards and microbatches.
    """

    def __init__(
        self,
        state: ModelState,
        group: int,
        forward: ForwardPass,
        described: ForwardProperties,
        examples: int,
        division: Division,
    ):
        self._state = state
        self._group = group
        self._forward = forward
        self._described = described
        self._examples = examples
        self._microbatches = division.microbatches
        self._division = division
        self._losses = state.groups[group].losses
        self._terms = self._losses.terms
        place = {id(v): index for index, v in enumerate(state.model.trainable_variables)}
        self._own = [place[id(v)] for v in state.groups[group].variables]

    def compute(
        self, context: Context, batch: Nest, trainable: list[Tensor], statistics: list[Tensor],
        scale: Tensor | float | None,
    ) -> ShardResult:  # fmt: skip
        """Returns gradients, new statistics, metric states and losses of the shard.

        Args:
            context: the replica context.
            batch: the shard, `(x, y)` or `(x, y, sample_weight)`.
            trainable: the values of the model's trainable variables.
            statistics: the values of the moving statistics.
            scale: the factor to multiply the loss by, for float16; None: 1.
        """
        divisors = self._compute_divisors(context, batch, trainable, statistics)
        watched = [trainable[index] for index in self._own]
        reached: list[bool] = []

        def compute_microbatch(index, metrics, batch):
            values = Values(trainable, statistics, self._compute_seeds(context, index), metrics)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(watched)
                result = self._run(batch, values)
                loss, terms = sum_losses(
                    self._terms, result.computed, divisors, self._division.parts
                )
                scaled = loss if scale is None else loss * scale
            grads: Any = tape.gradient(scaled, watched)
            reached[:] = [grad is not None for grad in grads]
            refuse_unreached(self._terms, reached)
            grads = [
                tf.zeros_like(value) if grad is None else tf.convert_to_tensor(grad)
                for grad, value in zip(grads, watched)
            ]
            return grads, result.statistics, result.metrics, [loss, *terms]

        zero_metrics = self._forward.build_zero_metrics()
        if self._microbatches == 1:
            grads, stats, metrics, losses = compute_microbatch(0, zero_metrics, batch)
        else:
            grads, stats, metrics, losses = self._accumulate(
                compute_microbatch, batch, watched, statistics, zero_metrics
            )
        return ShardResult(grads, reached, stats, metrics, losses)

    def _run(self, batch: Nest, values: Values) -> Forward:
        return self._forward.run(batch, values, training=True, division=self._division)

    def _compute_divisors(
        self, context: Context, batch: Nest, trainable: list[Tensor], statistics: list[Tensor]
    ) -> list[Any]:
        """Returns the global divisor of each loss term; floats if none depends on the data."""
        known = [value for value in self._described.divisors if value is not None]
        if len(known) == len(self._terms):
            return known
        losses = self._losses
        if self._described.masked or not isinstance(losses, CompiledLosses):
            # Only the divisors are used, so the compiler removes the rest of this forward pass.
            values = Values(trainable, statistics, self._compute_seeds(context, 0))
            elements = self._run(batch, values).computed.elements
        else:
            elements = losses.compute_zero_elements(batch, self._described.output)
        local = [
            tf.cast(
                compute_shard_divisor(term, found, self._division.shards, self._microbatches),
                tf.float32,
            )
            for term, found in zip(self._terms, elements)
        ]
        if self._division.exchange is None:  # each replica has the whole batch
            return local
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stack(local))
        return tf.unstack(total)

    def _accumulate(
        self, microbatch: Callable, batch: Nest, trainable: list, statistics: list, metrics: list
    ) -> tuple:
        """Calls `microbatch` in a device loop; adds up its results, but averages the statistics."""
        count = self._microbatches
        cut = keras.tree.map_structure(lambda t: tf.reshape(t, (count, -1, *t.shape[1:])), batch)

        def body(index, grads, stats, metrics, losses):
            here = keras.tree.map_structure(lambda t: t[index], cut)
            new_grads, new_stats, metrics, new_losses = microbatch(index, metrics, here)
            add = functools.partial(keras.tree.map_structure, tf.add)
            return (
                index + 1,
                add(grads, new_grads),
                add(stats, new_stats),
                metrics,
                add(losses, new_losses),
            )

        zeros: Any = functools.partial(keras.tree.map_structure, tf.zeros_like)
        losses = [tf.zeros(()) for _ in range(len(self._terms) + 1)]
        start = (tf.constant(0), zeros(trainable), zeros(statistics), metrics, losses)
        _, grads, stats, metrics, losses = tf.while_loop(
            lambda index, *_: index < count,
            body,
            start,
            parallel_iterations=1,
            maximum_iterations=count,
        )
        return grads, [s / count for s in stats], metrics, losses

    def _compute_seeds(self, context: Context, microbatch: Any) -> list[Tensor]:
        replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        replica = tf.zeros_like(replica) if self._division.exchange is None else replica
        first = (replica * self._microbatches + microbatch) * self._examples
        return self._state.compute_seeds(replica, microbatch, first, self._group)
