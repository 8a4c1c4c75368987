"""The train and the eval step of one replica: the only definition of either.

The trainer runs it, preflight compiles it, the tests compare it with plain TensorFlow. It keeps
one promise: the result does not depend on how many replicas share the global batch. In order:

1. the forward pass over the replica's share, in `gradient_accumulation_steps` microbatches, one device loop;
2. losses as sums over elements, divided by a divisor of the global batch (`objective.py`);
3. gradients, added up over the microbatches, then once over the replicas;
4. loss unscaling and the overflow test, on the sum, so that all replicas skip or none;
5. clipping of that sum; the optimizer's update, on each replica for itself; the average of the
   weights (EMA);
6. metrics, added up on each replica and over replicas when they are read.

The forward pass is pure: it runs in a `keras.StatelessScope`, where every variable is a tensor
handed in and every update a tensor handed out. That is what lets microbatches start from the same
batch statistics, and random layers draw other numbers on every replica.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines.objective import Objective, divisor, weighted_sum
from tftpu.engines.tensorflow import checks, flops, internals
from tftpu.engines.tensorflow.totals import EvalTotals, TrainTotals
from tftpu.errors import UserError
from tftpu.tpu import target


def _for_its_platform(method: Callable) -> Callable:
    """Traces a method of `Step` for the platform that the step was made for."""

    @functools.wraps(method)
    def traced(self, *args):
        with target.compiling_for(self.platform):
            return method(self, *args)

    return traced


class Forward(NamedTuple):
    """What one microbatch gives."""

    y_pred: Any
    elements: list  # of objective.Elements, one for each loss
    added: tf.Tensor  # the model's own losses: a mean over the examples in hand
    statistics: list[tf.Tensor]
    metrics: list[tf.Tensor]


class Step:
    """The step of a compiled model, for the strategy in whose scope it is made.

    Args:
        model: a compiled Keras model; it is built here if it is not yet.
        batch: one replica's share as `tf.TensorSpec`s of static shape: `(x, y)` or
            `(x, y, sample_weight)`, nested as the model takes them.
        gradient_accumulation_steps: microbatches that the share is cut into.
        global_clipnorm: the largest global norm of the reduced gradient; None: not clipped.
        ema_momentum: decay of the average of the weights; None: no average is kept.
        seed: of dropout and of every other layer that draws random numbers.
        training: False leaves out `prepare`, for a model that is only evaluated.

    Raises:
        UserError: the model cannot be trained as it is; the message says why and what to do.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Any,
        *,
        gradient_accumulation_steps: int = 1,
        global_clipnorm: float | None = None,
        ema_momentum: float | None = None,
        seed: int = 0,
        training: bool = True,
    ):
        self.model = model
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.global_clipnorm = global_clipnorm
        self.ema_momentum = ema_momentum
        self.seed = seed
        strategy = tf.distribute.get_strategy()
        self.replicas = strategy.num_replicas_in_sync
        on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self.platform = "tpu" if on_tpu else target.platform()
        self.prepared = False
        self._statistics: list = []  # the moving statistics that training changes
        checks.refuse_model(model)
        self._build(batch)
        self.objective = Objective(model)
        self._drawn_apart = internals.seed_states(model)
        self._drawn_by_example = internals.example_seeds(model)
        self._seed_states = [*self._drawn_apart, *self._drawn_by_example]
        self._create_variables()
        if training:
            self.prepare(batch)

    def prepare(self, batch: Any) -> None:
        """Gets ready to train on shares of this shape; once, before `train` is traced.

        Traces the forward pass, to learn which variables it updates, what it masks, and whether
        XLA can compile it.

        Raises:
            UserError: the shape or a layer cannot be trained on.
        """
        seeds = {id(v) for v in self._seed_states}
        self._statistics = [v for v in self.model.non_trainable_variables if id(v) not in seeds]
        microbatch = keras.tree.map_structure(self._microbatch_spec, batch)
        self._microbatch = microbatch
        self._microbatch_examples = keras.tree.flatten(microbatch)[0].shape[0]
        self._describe(microbatch)
        self.prepared = True

    @functools.cached_property
    @_for_its_platform
    def model_flops(self) -> int:
        """Of a global batch, forward and backward; traces the model, as it is in evaluation.

        How a layer takes batch statistics in training is no work of the model's.
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(self._microbatch)
        forward = tf.function(lambda x: self.model(x, training=False), autograph=False)
        ops = checks.graph_ops(forward.get_concrete_function(x).graph)
        return (
            flops.PASSES * self.gradient_accumulation_steps * self.replicas * flops.of_forward(ops)
        )

    @_for_its_platform
    def train(self, batch: Any) -> None:
        """One update of the model from one replica's share of the global batch.

        Runs in replica context. The losses and metrics are added to `train_totals`.
        """
        context = tf.distribute.get_replica_context()
        trainable = [tf.convert_to_tensor(v.value) for v in self.model.trainable_variables]
        before = [tf.convert_to_tensor(v.value) for v in self._statistics]
        divisors = self._divisors(context, batch, trainable, before)
        scale = self._loss_scale()

        sums = self._gradients(context, batch, trainable, before, divisors, scale)
        grads, statistics, metrics, losses = sums
        grads = list(context.all_reduce(tf.distribute.ReduceOp.SUM, grads))
        grads = [grad / scale for grad in grads] if scale is not None else grads
        norm = tf.linalg.global_norm(grads)
        finite = tf.math.is_finite(norm)
        if self.global_clipnorm:
            grads = [
                g * (self.global_clipnorm / tf.maximum(norm, self.global_clipnorm)) for g in grads
            ]

        if self._dynamic_scale:
            tf.cond(finite, lambda: self._apply(grads), lambda: None)
            self._adjust_scale(finite)
            self.optimizer.iterations.assign_add(tf.cast(finite, self.optimizer.iterations.dtype))
            # A skipped step must poison neither the moving statistics nor what is logged.
            statistics = [tf.where(finite, new, old) for new, old in zip(statistics, before)]
            norm, *losses = (tf.where(finite, value, 0.0) for value in (norm, *losses))
            metrics = [tf.where(finite, state, tf.zeros_like(state)) for state in metrics]
        else:
            with tf.name_scope("optimizer"):
                self._apply(grads)
                # A Python number: a tensor would be broadcast from the first replica, a collective.
                self.optimizer.iterations.value.assign_add(1)
        for variable, value in zip(self._statistics, statistics):
            variable.value.assign(value)
        self.step.assign_add(1)
        skipped = 1.0 - tf.cast(finite, tf.float32)
        self.train_totals.add(self.replicas, norm, skipped, losses, metrics)

    def synchronise(self) -> None:
        """Makes the moving statistics of all replicas their mean. Runs in replica context."""
        if self.replicas > 1 and self._statistics:
            context = tf.distribute.get_replica_context()
            # Copies, on the replica's device, which collectives between hosts ask for.
            local = [tf.identity(v.value) for v in self._statistics]
            mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, local)
            for variable, value in zip(self._statistics, mean):
                variable.value.assign(value)

    def weight_norm(self) -> tf.Tensor:
        """The global norm of the trainable weights, (). The step itself does not work it out."""
        weights = [tf.convert_to_tensor(v.value) for v in self.model.trainable_variables]
        return tf.linalg.global_norm(weights)

    @_for_its_platform
    def evaluate(self, batch: Any, valid: tf.Tensor) -> None:
        """Adds one replica's share of an evaluation batch to `eval_totals`.

        Args:
            batch: as for `train`.
            valid: (batch,) float32, 1.0 for examples and 0.0 for padding.
        """
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        forward = self._forward(
            (x, y, weight), valid, self._evaluated_weights(), None, None, None, training=False
        )
        sums = [weighted_sum(elements) for elements in forward.elements]
        counts = [
            tf.convert_to_tensor(divisor(term, elements, self.replicas))
            for term, elements in zip(self.objective.terms, forward.elements)
        ]
        self.eval_totals.add(self.replicas, forward.added, sums, counts, forward.metrics)

    @_for_its_platform
    def predict(self, x: Any) -> Any:
        """The model's output for one replica's share of the features."""
        with self._scope(self._evaluated_weights(), None, None, None):
            return self.model(x, training=False)

    def diverged(self, sums: np.ndarray) -> bool:
        """Whether the sums of a device loop show a loss that is not finite any more.

        With a dynamic loss scale single steps may overflow; not all of them at the least scale.
        """
        if not self._dynamic_scale:
            return not np.isfinite(sums).all()
        steps, _, skipped = sums[:3]
        return skipped == steps and float(self.model.optimizer.dynamic_scale.numpy()) <= 1.0

    @property
    def variables(self) -> dict[str, list]:
        """Everything that a checkpoint holds, by group: Keras or TensorFlow variables."""
        model = self.model
        seeds = {id(v) for v in self._seed_states}
        own = {id(v) for v in self.optimizer.variables}
        groups = {
            "model": [v for v in model.variables if id(v) not in seeds],
            "optimizer": list(self.optimizer.variables),
            "step": [self.step],
            "ema": self.averages,
        }
        if self._dynamic_scale:  # apart: a run may go on in another precision
            groups["loss_scale"] = [v for v in model.optimizer.variables if id(v) not in own]
        return groups

    # Construction

    def _microbatch_spec(self, spec: tf.TensorSpec) -> tf.TensorSpec:
        return tf.TensorSpec(
            (spec.shape[0] // self.gradient_accumulation_steps, *spec.shape[1:]), spec.dtype
        )

    def _build(self, batch: Any) -> None:
        keras.tree.map_structure(checks.refuse_spec, batch)
        symbolic = keras.tree.map_structure(
            lambda s: keras.KerasTensor(tuple(s.shape), s.dtype.name), batch
        )
        internals.build(self.model, symbolic)
        optimizer = self.model.optimizer
        self._dynamic_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.optimizer = optimizer.inner_optimizer if self._dynamic_scale else optimizer

    @_for_its_platform
    def _describe(self, microbatch: Any) -> None:
        """Traces the forward pass once, to learn what it updates, masks and cannot do on XLA."""
        output = {}

        def forward(batch):
            output["forward"] = result = self._forward(
                batch, None, None, None, None, None, training=True
            )
            return keras.tree.flatten((result.y_pred, result.statistics))

        graph = tf.function(forward, autograph=False).get_concrete_function(microbatch).graph
        checks.refuse_host_ops(checks.graph_ops(graph))
        result = output["forward"]
        changed = [
            v
            for v, new in zip(self._statistics, result.statistics)
            if new is not None  # None: the forward pass left it alone
        ]
        for variable in changed:
            if not tf.as_dtype(variable.dtype).is_floating:
                raise UserError(
                    f"The layer variable {variable.path!r} is a {variable.dtype} that changes in "
                    "training: replicas would disagree about it. Keep such counts in a metric."
                )
        self._statistics = changed
        self._output = keras.tree.map_structure(
            lambda t: tf.TensorSpec(t.shape[1:], t.dtype), result.y_pred
        )
        self._masked = any(
            internals.keras_mask(t) is not None for t in keras.tree.flatten(result.y_pred)
        )
        self._static_divisors = [
            None if elements.count is not None else divisor(term, elements, self.replicas)
            for term, elements in zip(self.objective.terms, result.elements)
        ]

    def _create_variables(self) -> None:
        make = functools.partial(tf.Variable, trainable=False)
        self.step = make(tf.zeros((), tf.int64), name="step")
        self.train_totals = TrainTotals(self.objective)
        self.eval_totals = EvalTotals(self.objective)
        self.averages = []
        if self.ema_momentum is not None:
            self.averages = [
                make(v.numpy(), name=f"ema/{v.path}") for v in self.model.trainable_variables
            ]

    # Forward and backward

    def _scope(self, trainable, statistics, seeds, metrics) -> keras.StatelessScope:
        """A scope in which variables have the given values; None leaves them as they are."""
        groups = (
            (self.model.trainable_variables, trainable),
            (self._statistics, statistics),
            (self._seed_states, seeds),
            (self.objective.metric_variables, metrics),
        )
        mapping = [pair for group, values in groups if values for pair in zip(group, values)]
        return keras.StatelessScope(state_mapping=mapping, collect_losses=True)

    def _forward(
        self, batch, valid, trainable, statistics, seeds, metrics, *, training: bool
    ) -> Forward:
        """The pure forward pass of one microbatch: model, losses, metrics."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if metrics is None:
            metrics = [tf.zeros(v.shape, v.dtype) for v in self.objective.metric_variables]
        with self._scope(trainable, statistics, seeds, metrics) as scope:
            y_pred, factors = self._logits(x, training)
            own = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in scope.losses]
            for variable in self.model.trainable_variables:
                if variable.regularizer is not None:
                    own.append(tf.cast(variable.regularizer(variable.value), tf.float32))
            # The scopes are how preflight knows what an instruction is for.
            with tf.name_scope("loss"):
                elements = self.objective.elements(y, y_pred, weight, valid, factors)
            with tf.name_scope("metrics"):
                self.objective.update_metrics(y, y_pred, weight, valid)
            new = [scope.get_current_value(v) for v in self._statistics]
            states = [scope.get_current_value(v) for v in self.objective.metric_variables]
        return Forward(y_pred, elements, tf.add_n([tf.zeros(()), *own]), new, states)

    def _logits(self, x: Any, training: bool) -> tuple[Any, tuple | None]:
        """Returns the model's output and, where it offers them, the factors of its logits."""
        if hasattr(self.model, "factored_logits"):
            logits, *factors = self.model.factored_logits(x, training)
            return logits, tuple(factors)
        return self.model(x, training=training), None

    def _divisors(self, context, batch, trainable, statistics) -> list:
        """The global divisor of each loss; Python numbers where the data do not matter."""
        parts = self.gradient_accumulation_steps * self.replicas
        if all(known is not None for known in self._static_divisors):
            return [
                known * (self.replicas if term.loss.reduction == "sum" else parts)
                for term, known in zip(self.objective.terms, self._static_divisors)
            ]
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if self._masked:
            # Only the masks are used: the compiler removes the rest of this forward pass.
            seeds = self._seeds(context, 0)
            elements = self._forward(
                batch, None, trainable, statistics, seeds, None, training=True
            ).elements
        else:
            size = keras.tree.flatten(x)[0].shape[0]
            y_pred = keras.tree.map_structure(
                lambda s: tf.zeros((size, *s.shape), s.dtype), self._output
            )
            elements = self.objective.elements(y, y_pred, weight, None)
        local = [
            tf.cast(divisor(term, e, self.replicas), tf.float32)
            for term, e in zip(self.objective.terms, elements)
        ]
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stack(local))
        return tf.unstack(total)

    def _gradients(self, context, batch, trainable, statistics, divisors, scale) -> tuple:
        """Gradients, new statistics, metric states and losses of this replica's share."""
        parts = self.gradient_accumulation_steps * self.replicas

        def microbatch(index, metrics, batch):
            seeds = self._seeds(context, index)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(trainable)
                result = self._forward(
                    batch, None, trainable, statistics, seeds, metrics, training=True
                )
                terms = [
                    tf.math.divide_no_nan(weighted_sum(elements), divisor)
                    for elements, divisor in zip(result.elements, divisors)
                ]
                weighted = [t * term.weight for t, term in zip(terms, self.objective.terms)]
                loss = tf.add_n([result.added / parts, *weighted])
                scaled = loss if scale is None else loss * scale
            grads = tape.gradient(scaled, trainable)
            self._unconnected = [grad is None for grad in grads]
            grads = [
                tf.zeros_like(value) if grad is None else tf.convert_to_tensor(grad)
                for grad, value in zip(grads, trainable)
            ]
            return grads, result.statistics, result.metrics, [loss, *terms]

        zero_metrics = [tf.zeros(v.shape, v.dtype) for v in self.objective.metric_variables]
        if self.gradient_accumulation_steps == 1:
            return microbatch(0, zero_metrics, batch)
        return self._loop(microbatch, batch, trainable, statistics, zero_metrics)

    def _loop(self, microbatch: Callable, batch, trainable, statistics, metrics) -> tuple:
        """Adds up `microbatch` over the share in one device loop; statistics are averaged."""
        cut = keras.tree.map_structure(
            lambda t: tf.reshape(t, (self.gradient_accumulation_steps, -1, *t.shape[1:])), batch
        )

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

        zeros = functools.partial(keras.tree.map_structure, tf.zeros_like)
        losses = [tf.zeros(()) for _ in range(len(self.objective.terms) + 1)]
        start = (tf.constant(0), zeros(trainable), zeros(statistics), metrics, losses)
        _, grads, stats, metrics, losses = tf.while_loop(
            lambda index, *_: index < self.gradient_accumulation_steps,
            body,
            start,
            parallel_iterations=1,
            maximum_iterations=self.gradient_accumulation_steps,
        )
        return grads, [s / self.gradient_accumulation_steps for s in stats], metrics, losses

    def _seeds(self, context, microbatch: int | tf.Tensor) -> list[tf.Tensor]:
        """The state of each seed generator, in the order of `_seed_states`.

        Seeds differ by generator, step, replica and microbatch, and by nothing else; of generators
        that draw by example not by replica and microbatch, but they are told where they are.
        """
        replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        apart = (tf.cast(self.step, tf.int32), replica, microbatch)
        first = (
            replica * self.gradient_accumulation_steps + microbatch
        ) * self._microbatch_examples
        seeds = []
        for index, state in enumerate(self._seed_states):
            seed = tf.constant([self.seed, index], tf.int32)
            by_example = index >= len(self._drawn_apart)
            for data in apart[:1] if by_example else apart:
                seed = tf.random.experimental.stateless_fold_in(seed, data)
            seed = tf.concat([seed, [first]], 0) if by_example else seed
            seeds.append(tf.cast(seed, state.dtype))
        return seeds

    def _evaluated_weights(self) -> list[tf.Tensor] | None:
        return [tf.convert_to_tensor(v) for v in self.averages] or None

    # Update

    def _apply(self, grads: list[tf.Tensor]) -> None:
        """The optimizer's update of this replica's own copy, from gradients equal on all."""
        optimizer = self.optimizer
        connected = [
            (grad, variable)
            for grad, variable, unused in zip(
                grads, self.model.trainable_variables, self._unconnected
            )
            if not unused
        ]
        grads = internals.clip(optimizer, [grad for grad, _ in connected])
        rate = tf.convert_to_tensor(optimizer.learning_rate)
        internals.apply_weight_decay(optimizer, [variable for _, variable in connected])
        for grad, (_, variable) in zip(grads, connected):
            value = variable.value
            optimizer.update_step(grad, value, rate)
            if variable.constraint is not None:
                value.assign(variable.constraint(tf.convert_to_tensor(value)))
        for average, variable in zip(self.averages, self.model.trainable_variables):
            average.assign_sub((average - variable.value) * (1.0 - self.ema_momentum))

    def _loss_scale(self) -> tf.Tensor | float | None:
        if self._dynamic_scale:
            return tf.convert_to_tensor(self.model.optimizer.dynamic_scale.value)
        return self.optimizer.loss_scale_factor

    def _adjust_scale(self, finite: tf.Tensor) -> None:
        """Halves the loss scale after an overflow, doubles it after enough steps without."""
        scaler = self.model.optimizer
        scale, count = scaler.dynamic_scale.value, scaler.step_counter.value
        zero = tf.zeros((), count.dtype)
        good = tf.where(finite, count + 1, zero)
        grow = good >= scaler.dynamic_growth_steps
        scale.assign(
            tf.where(finite, tf.where(grow, scale * 2.0, scale), tf.maximum(scale / 2.0, 1.0))
        )
        count.assign(tf.where(grow, zero, good))
