"""The step of one objective over the whole global batch: gradients, clipping, update."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from tftpu.engines import checks, keras_internals
from tftpu.engines.data.division import Division
from tftpu.engines.jax import jaxprs
from tftpu.engines.jax.placement.vocabulary import ShardedRows, find_tables
from tftpu.engines.jax.state import JaxState, StateValues
from tftpu.engines.jax.step import update
from tftpu.engines.jax.step.microbatches import MicrobatchLayout
from tftpu.engines.objectives import forward
from tftpu.engines.objectives.compiled import CompiledLosses
from tftpu.engines.objectives.forward import Forward, ForwardPass, describe_pass
from tftpu.engines.objectives.losses import compute_shard_divisor, sum_losses
from tftpu.engines.objectives.sums import GroupSums
from tftpu.engines.origins import Origin
from tftpu.tensors import Nest, Tensor

Arrays = list[Any]  # a list of jax.Array


class ObjectiveResult(NamedTuple):
    """The results of one objective in one step.

    Attributes:
        values: the values of all variables after the step.
        sums: the summands of this step in the sums over steps.
        norm: the global norm of the gradient, (); 0 if a dynamic loss scale skips the update.
        finite: whether the gradient was finite, () bool; if not, a dynamic loss scale skips the
            update.
        metrics: the states of the metrics for this step's batch.
    """

    values: StateValues
    sums: GroupSums
    norm: Tensor
    finite: Tensor
    metrics: Arrays


class ObjectiveStep:
    """The step of one objective.

    The constructor traces the forward pass, to find the variables that it updates and reads.

    Args:
        state: the variables.
        index: the index of the objective.
        microbatching: the division of a global batch into microbatches.

    Attributes:
        changed: the indices in `state.untrained` of the variables that the forward pass changes.
        takes_padding: whether padding can be left out of all results of a batch.
        constants: the variables outside of the model that the objective reads, each with its value
            at the time of tracing, which is a constant in the program.

    Raises:
        UserError: the objective cannot be trained.
    """

    def __init__(self, state: JaxState, index: int, microbatching: MicrobatchLayout):
        self._state, self._index, self._microbatching = state, index, microbatching
        self._group = state.groups[index]
        self._losses = self._group.losses
        weights = state.model.trainable_variables
        optimizers = [v for group in state.groups for v in group.optimizer.variables]
        # The index of the first weight in the list of variables passed to `ForwardPass`.
        self._first = len(state.untrained) + len(optimizers)
        self._forward = ForwardPass(state, self._losses, [*state.untrained, *optimizers, *weights])
        self._division = Division(1, microbatching.microbatches)
        places = {id(v): place for place, v in enumerate(weights)}
        self._own = [places[id(v)] for v in self._group.variables]
        traced, reached = self._trace_forward()
        self._tables = _find_tables(state, traced)
        if self._tables:
            self._division = self._division._replace(rows=ShardedRows(state.layout.mesh))
        checks.refuse_updates(traced.updated, state.model, state.untrained, state.seed_states)
        self.constants = _find_constants(state, traced.read)
        checks.refuse_unreached(self._losses.terms, reached)
        # Without microbatches, a loss that returns one number is computed from the whole batch.
        if microbatching.microbatches > 1:
            checks.warn_of_means(self._group, traced.computed)
        self._reached = reached
        updated = {id(v) for v in traced.updated}
        self.changed = [i for i, v in enumerate(state.untrained) if id(v) in updated]
        # Indices of the weights that layers themselves assign before the update.
        self._assigned = [i for i, v in enumerate(weights) if id(v) in updated]
        self._described = describe_pass(traced, self._losses, microbatching.microbatches)
        self.takes_padding: bool = traced.computed.separable and not updated

    def train(
        self, begun: StateValues, values: StateValues, step: Any, batch: Nest
    ) -> ObjectiveResult:
        """Returns the results of one update of the objective's variables from a global batch.

        Args:
            begun: the values of all variables at the beginning of the step.
            values: their values after the updates of earlier objectives.
            step: the number of steps done, () int32.
            batch: the global batch.
        """
        state, group, owner = self._state, self._group, self._group.owner
        scale = values.scales[owner][0] if group.scaler else group.optimizer.loss_scale_factor
        at = begun if group.simultaneous else values
        grads, changed, metrics, losses = self._compute_gradients(at, step, batch, scale)
        grads = [grad / scale for grad in grads] if scale is not None else grads
        norm = update.compute_global_norm(grads)
        finite = jnp.isfinite(norm)
        limit = state.options.global_clipnorm
        if limit:
            grads = [grad * (limit / jnp.maximum(norm, limit)) for grad in grads]
        if group.scaler is not None:
            # A skipped step must change neither the variables nor the logged values.
            changed = _select_where(finite, changed, self._select_changed(values))
        statistics, assigned = changed[: len(self.changed)], changed[len(self.changed) :]
        values = values._replace(
            trainable=_replace_entries(values.trainable, self._assigned, assigned)
        )
        with jax.named_scope("optimizer"):
            own = [values.trainable[i] for i in self._own]
            updated = update.apply_gradients(
                group, grads, self._reached, own, values.optimizers[owner]
            )
        taken = jnp.ones(())
        scales = values.scales[owner]
        if group.scaler is not None:
            updated = _select_where(
                finite, updated, update.UpdateResult(own, values.optimizers[owner])
            )
            scales = update.adjust_loss_scale(group, scales, finite)
            norm, losses, metrics = (
                jax.tree.map(lambda value: jnp.where(finite, value, 0).astype(value.dtype), given)
                for given in (norm, losses, metrics)
            )
            taken = jnp.where(finite, 1.0, 0.0)
        values = StateValues(
            _replace_entries(values.trainable, self._own, updated.variables),
            _replace_entries(values.untrained, self.changed, statistics),
            _replace_entries(values.optimizers, [owner], [updated.optimizer]),
            _replace_entries(values.scales, [owner], [scales]),
            values.averages,
        )
        return ObjectiveResult(values, GroupSums(taken, losses), norm, finite, metrics)

    def compute_outputs(self, values: StateValues, batch: Nest) -> Nest:
        """Returns the outputs of the forward pass, computed as in evaluation."""
        with self._state.gathering.reading():
            return self._forward.compute_outputs(
                batch, forward.Values(values.trainable, values.untrained)
            )

    def count_flops(self) -> int:
        """Returns the model FLOPs of a microbatch, forward and backward.

        Traces the model as in evaluation: batch statistics do not count as model FLOPs.
        """
        state = self._state

        def trace(batch: Nest, trainable: Arrays, untrained: Arrays) -> Nest:
            return self.compute_outputs(StateValues(trainable, untrained, [], [], []), batch)

        trainable, untrained = (
            [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
            for variables in (state.model.trainable_variables, state.untrained)
        )
        jaxpr = jax.make_jaxpr(trace)(self._microbatching.microbatch, trainable, untrained).jaxpr
        origins = [Origin.FIXED] * len(trainable)
        for place in self._own:
            origins[place] = Origin.TRAINED
        data = [Origin.DATA] * len(jax.tree.leaves(self._microbatching.microbatch))
        return jaxprs.count_step_flops(jaxpr, [*data, *origins, *[Origin.FIXED] * len(untrained)])

    def create_idle_sums(self) -> GroupSums:
        """Returns the sums of a step in which the objective is not due."""
        zero = jnp.zeros(())
        return GroupSums(zero, [zero] * (1 + len(self._losses.terms)))

    def _select_changed(self, values: StateValues) -> Arrays:
        """Returns the values of the variables that the forward pass changes."""
        untrained = [values.untrained[i] for i in self.changed]
        return [*untrained, *(values.trainable[i] for i in self._assigned)]

    def _compute_gradients(
        self, values: StateValues, step: Any, batch: Nest, scale: Any
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Returns gradients, changed variables, metric states and losses of a global batch."""
        mask = self._microbatching.build_mask()
        divisors = self._compute_divisors(values, step, batch, mask)
        own = [values.trainable[i] for i in self._own]
        changed = [*self.changed, *(self._first + i for i in self._assigned)]

        def compute_microbatch(number, metrics, batch, valid):
            def compute_loss(own):
                result = self._run(values, own, step, number, batch, metrics, valid)
                loss, terms = sum_losses(self._losses.terms, result.computed, divisors,
                                          self._division.parts)  # fmt: skip
                statistics = [result.statistics[i] for i in changed]
                scaled = loss if scale is None else loss * scale
                return scaled, (statistics, result.metrics, [loss, *terms])

            (_, others), grads = jax.value_and_grad(compute_loss, has_aux=True)(own)
            return self._constrain_gradients(grads), *others

        zeros = self._forward.build_zero_metrics()
        if self._microbatching.microbatches == 1:
            return compute_microbatch(0, zeros, batch, mask)

        def body(carry, given):
            grads, statistics, metrics, losses = carry
            number, part, valid = given
            new_grads, new_statistics, metrics, new_losses = compute_microbatch(
                number, metrics, part, valid
            )
            add = functools.partial(jax.tree.map, jnp.add)
            return (
                self._constrain_gradients(add(grads, new_grads)),
                add(statistics, new_statistics),
                metrics,
                add(losses, new_losses),
            ), None

        count = self._microbatching.microbatches
        start = (
            self._constrain_gradients([jnp.zeros_like(value) for value in own]),
            [jnp.zeros_like(value) for value in self._select_changed(values)],
            zeros,
            [jnp.zeros(())] * (1 + len(self._losses.terms)),
        )
        split = self._microbatching.split_batch
        numbered = (jnp.arange(count), split(batch), split(mask))
        (grads, statistics, metrics, losses), _ = jax.lax.scan(body, start, numbered)
        return grads, [value / count for value in statistics], metrics, losses

    def _run(
        self,
        values: StateValues,
        own: Arrays,
        step: Any,
        number: Any,
        batch: Nest,
        metrics: Any = None,
        valid: Any = None,
    ) -> Forward:
        positions = self._microbatching.find_positions(number)
        given = forward.Values(
            _replace_entries(values.trainable, self._own, own),
            [*values.untrained, *(v for group in values.optimizers for v in group)],
            self._state.compute_seeds(step, number, positions, self._index),
            metrics,
        )
        with self._state.gathering.reading(self._tables):
            return self._forward.run(
                batch, given, training=True, division=self._division, valid=valid
            )

    def _compute_divisors(self, values: StateValues, step: Any, batch: Nest, valid: Any) -> Arrays:
        """Returns the global divisor of each loss."""
        known, losses = self._described.divisors, self._losses
        if all(value is not None for value in known):
            return known
        if self._described.masked or not isinstance(losses, CompiledLosses):
            # Only the divisors are used, so the compiler removes the rest of this forward pass.
            own = [values.trainable[i] for i in self._own]
            elements = self._run(values, own, step, 0, batch, valid=valid).computed.elements
        else:
            elements = losses.compute_zero_elements(batch, self._described.output, valid)
        microbatches = self._microbatching.microbatches
        return [
            jnp.asarray(compute_shard_divisor(term, found, 1, microbatches), "float32")
            for term, found in zip(losses.terms, elements)
        ]

    def _constrain_gradients(self, grads: Arrays) -> Arrays:
        """Shards gradients like their variables, so one reduce-scatter sums and shards them."""
        layout = self._state.layout
        return [
            jax.lax.with_sharding_constraint(grad, layout.find_weight_sharding(variable))
            for grad, variable in zip(grads, self._group.variables)
        ]

    def _trace_forward(self) -> tuple[Forward, list[bool]]:
        """Traces the forward pass; returns it, and whether the loss depends on each variable."""
        state, results = self._state, []

        def trace(own, batch):
            trainable = _replace_entries(state.read_trained_values(), self._own, own)
            read = [v.value for v in self._forward.statistics[: self._first]]
            given = forward.Values(
                trainable, read, state.compute_seeds(0, 0, self._microbatching.find_positions(0))
            )
            mask = self._microbatching.build_mask()
            if mask is not None:
                mask = mask[: len(jax.tree.leaves(batch)[0])]
            result = self._forward.run(
                batch, given, training=True, division=self._division, valid=mask
            )
            results.append(result)
            computed = result.computed
            weighed = [
                (element.values, element.weight)
                for term, element in zip(self._losses.terms, computed.elements)
                if term.counts
            ]
            return jax.tree.leaves((weighed, computed.added))

        own = [state.read_trained_values()[i] for i in self._own]
        jaxpr = jax.make_jaxpr(trace)(own, self._microbatching.microbatch).jaxpr
        return results[-1], jaxprs.find_reached(jaxpr, jaxpr.invars[: len(own)])


def _find_constants(
    state: JaxState, read: list[keras.Variable]
) -> list[tuple[keras.Variable, Any]]:
    """Returns the variables in `read` that are not part of the model, with their values."""
    model = state.model
    states = [*state.seed_states, *keras_internals.list_compiled_states(model)]
    known = {id(v) for v in [*model.variables, *states]}
    return [(v, v.value) for v in read if id(v) not in known]


def _find_tables(state: JaxState, traced: Forward) -> list[keras.Variable]:
    """Returns the vocabulary tables to keep sharded; [] if no loss is computed in chunks."""
    if not any(e.chunked is not None for e in traced.computed.elements):
        return []
    variables = [*state.model.trainable_variables, *state.untrained]
    return find_tables(state.layout, variables, traced.computed.y_pred.shape)


def _replace_entries(whole: list[Any], places: list[int], new: list[Any]) -> list[Any]:
    """Returns a copy of a list with new entries at some indices."""
    copy = [*whole]
    for place, value in zip(places, new):
        copy[place] = value
    return copy


def _select_where(condition: Any, new: Any, old: Any) -> Any:
    """Returns the new arrays of a nest if a condition holds, and the old ones otherwise."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
