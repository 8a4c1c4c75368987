"""The train step of one replica.

The trainer runs it, preflight compiles it, and tests compare it with plain TensorFlow. Its result
does not depend on how many replicas share the global batch. In order, a step computes:

1. the forward pass over the replica's shard, in microbatches, in one device loop;
2. losses as sums over elements, divided by a divisor of the global batch (`losses.py`);
3. gradients, added up over the microbatches, then once over the replicas;
4. loss unscaling and the overflow test on that sum, so either all replicas skip the update or none;
5. clipping of that sum; the optimizer's update, separately on each replica; the moving averages of
   the weights;
6. metrics, added up on each replica, and over replicas when they are read.

With several objectives, the step runs 1 to 5 for each objective that is due, one after the other
(`objective_step.py`), except that it computes the gradients of simultaneous objectives first, and
updates the moving averages once at the end.
"""

import functools
import math
from typing import Any

import keras
import tensorflow as tf

from tftpu.blocks.running import check_blocks
from tftpu.engines import checks
from tftpu.engines.data.division import Division
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.objectives.sums import TrainSums
from tftpu.engines.tensorflow.state import ModelState
from tftpu.engines.tensorflow.step import update
from tftpu.engines.tensorflow.step.accumulator import Accumulator
from tftpu.engines.tensorflow.step.loops import StepVariants
from tftpu.engines.tensorflow.step.objective_step import ObjectiveStep
from tftpu.engines.tensorflow.step.replicas import EXCHANGE
from tftpu.tensors import Nest


class TrainStep:
    """The train step of a model, for the strategy in whose scope this object is created.

    The constructor traces the forward pass, to find the variables that it updates, its masks, and
    ops that XLA cannot compile.

    Args:
        state: the variables.
        batch_spec: spec of one replica's shard, `(x, y)` or `(x, y, sample_weight)` of
            `tf.TensorSpec`s of static shape.
        examples: the size of a global batch that the replicas cannot divide equally, so each
            computes the whole batch. None: the shards are equal.

    Attributes:
        state: the variables.
        statistics: the moving statistics that a step changes.
        divisors: the global divisor of each term; None where it depends on the data.
        sums: the layout of the vector in `accumulator`.
        accumulator: the sums over steps.

    Raises:
        UserError: the shape or a layer does not allow training.
    """

    def __init__(self, state: ModelState, batch_spec: Nest, examples: int | None = None):
        keras.tree.map_structure(checks.refuse_spec, batch_spec)
        checks.refuse_frozen(state.model, state.groups, state.compiled)
        check_blocks(state.model, state.options.remat, state.options.scan)
        self.state = state
        division = Division(state.replicas, state.options.gradient_accumulation_steps, EXCHANGE)
        if division.shards > 1 and division.microbatches > 1:
            checks.refuse_synchronized(state.model)
        size = count_examples(batch_spec) // division.microbatches
        self._division, self._examples = division, examples
        if examples is not None:
            self._division, size = Division(), examples
        self._microbatch = keras.tree.map_structure(
            lambda s: tf.TensorSpec((size, *s.shape[1:]), s.dtype), batch_spec
        )
        self._steps = [
            ObjectiveStep(state, i, self._microbatch, self._division)
            for i in range(len(state.groups))
        ]
        changed = {id(v): v for one in self._steps for v in one.statistics}
        self.statistics = [v for v in changed.values() if not v.trainable]
        checks.refuse_counters(self.statistics, "replicas")
        self.divisors = [value for one in self._steps for value in one.divisors]
        self.sums = TrainSums(state.groups)
        self.accumulator = Accumulator(self.sums.size, "train_sums")

    @functools.cached_property
    def model_flops(self) -> int:
        """The model FLOPs of a global batch, forward and backward.

        Traces the model as in evaluation: batch statistics do not count as model FLOPs.
        """
        flops = sum(one.count_flops(self._microbatch) for one in self._steps)
        return self._division.parts * flops

    def forward(self, microbatch: Nest) -> Nest:
        """Returns the outputs of the forward passes of all objectives, as in evaluation."""
        return [one.forward.compute_outputs(microbatch) for one in self._steps]

    @property
    def turns(self) -> StepVariants | None:
        """The step's variants, one per set of objectives due; None if all are due in each step."""
        every = [group.every for group in self.state.groups]
        cycle = math.lcm(*every)
        if cycle == 1:
            return None
        due = [tuple(i for i, n in enumerate(every) if step % n == 0) for step in range(cycle)]
        variants = sorted(set(due))
        order = tf.constant([variants.index(one) for one in due], tf.int32)
        return StepVariants(variants, lambda: order[tf.cast(self.state.step, tf.int32) % cycle])

    def train(self, batch: Nest, due: tuple[int, ...] | None = None) -> None:
        """Updates the model once, from one replica's shard of the global batch.

        Runs in replica context. Losses and metrics are added to `accumulator`.

        Args:
            batch: the shard, `(x, y)` or `(x, y, sample_weight)`.
            due: the indices of the objectives to train in this step; None: all.
        """
        context: Any = tf.distribute.get_replica_context()
        state = self.state
        if self._examples is not None:
            batch = self._join_shards(batch, self._examples)
        results, sums = [], []
        begun = {
            index: self._steps[index].compute_gradients(context, batch)
            for index, group in enumerate(state.groups)
            if group.simultaneous and (due is None or index in due)
        }
        for index, one in enumerate(self._steps):
            if due is None or index in due:
                found = begun.get(index) or one.compute_gradients(context, batch)
                results.append(one.update(found))
                sums.append(results[-1].sums)
            else:
                sums.append(one.create_idle_sums())
        finite = functools.reduce(tf.logical_and, [result.finite for result in results])
        if all(group.scaler is None for group in state.groups):
            update.update_averages(state)
        elif state.averages:
            tf.cond(finite, lambda: update.update_averages(state), lambda: None)
        state.step.assign_add(1)
        norm = tf.linalg.global_norm([result.norm for result in results])
        skipped = 1.0 - tf.cast(finite, tf.float32)
        metrics = [value for result in results for value in result.metrics]
        self.accumulator.add(self.sums.build_vector(state.replicas, norm, skipped, sums, metrics))

    def _join_shards(self, batch: Nest, examples: int) -> Nest:
        """Returns the whole global batch, without padding, from the shards of all replicas."""

        return keras.tree.map_structure(
            lambda shard: EXCHANGE.gather(shard, self.state.replicas)[:examples], batch
        )

    def synchronise(self) -> None:
        """Sets the moving statistics of all replicas to their mean, in replica context."""
        if self.state.replicas > 1 and self.statistics:
            context: Any = tf.distribute.get_replica_context()
            # Collectives between hosts need a copy of each value on the replica's device.
            local = [tf.identity(v.value) for v in self.statistics]
            mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, local)
            for variable, value in zip(self.statistics, mean):
                variable.value.assign(value)
