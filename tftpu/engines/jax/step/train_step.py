"""The train step of the JAX engine, one program over the whole mesh.

It computes the same as the step of `tftpu.engines.tensorflow.step.train_step`, in the same order,
but for the whole global batch instead of one shard: XLA divides the program, and adds the
communication that the shardings of the batch and the weights require.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import keras

from tftpu.blocks.running import check_blocks
from tftpu.engines import checks
from tftpu.engines.data import conversion
from tftpu.engines.jax.state import JaxState, StateValues
from tftpu.engines.jax.step.microbatches import MicrobatchLayout
from tftpu.engines.jax.step.objective_step import ObjectiveStep
from tftpu.engines.objectives.sums import TrainSums
from tftpu.errors import UserError
from tftpu.tensors import Nest, Tensor


class TrainStep:
    """The train step of a model on a mesh.

    Args:
        state: the variables.
        shard_spec: spec of one shard of a batch, `(x, y)` or `(x, y, sample_weight)` of
            `tf.TensorSpec`s of static shape.
        examples: the number of examples of a batch without its padding; None: there is no padding.

    Attributes:
        state: the variables.
        microbatching: the division of a batch into microbatches.
        sums: the layout of the sums over steps.

    Raises:
        UserError: the batch's shape or a layer does not allow training.
    """

    def __init__(self, state: JaxState, shard_spec: Nest, examples: int | None = None):
        keras.tree.map_structure(checks.refuse_spec, shard_spec)
        checks.refuse_frozen(state.model, state.groups, state.compiled)
        check_blocks(state.model, state.options.remat, state.options.scan)
        self.state = state
        microbatches = state.options.gradient_accumulation_steps
        self.microbatching = MicrobatchLayout(state.layout, shard_spec, microbatches, examples)
        self._steps = self._build_steps()
        if examples is not None and not all(one.takes_padding for one in self._steps):
            spec = conversion.replace_examples(shard_spec, examples)
            self.microbatching = MicrobatchLayout(state.layout, spec, 1, whole=True)
            self._steps = self._build_steps()
        checks.refuse_counters(
            [state.untrained[i] for one in self._steps for i in one.changed], "microbatches"
        )
        self.sums = TrainSums(state.groups)
        self._every = [group.every for group in state.groups]

    def _build_steps(self) -> list[ObjectiveStep]:
        groups = range(len(self.state.groups))
        return [ObjectiveStep(self.state, i, self.microbatching) for i in groups]

    @functools.cached_property
    def model_flops(self) -> int:
        """The model FLOPs of a global batch, forward and backward."""
        return self.microbatching.microbatches * sum(one.count_flops() for one in self._steps)

    def forward(self, values: StateValues, microbatch: Nest) -> Nest:
        """Returns the outputs of the forward passes of all objectives, as in evaluation."""
        return [one.compute_outputs(values, microbatch) for one in self._steps]

    def select_due(self, step: int) -> tuple[int, ...]:
        """Returns the indices of the objectives to train in the next step, after `step` steps."""
        return tuple(i for i, every in enumerate(self._every) if step % every == 0)

    def train(
        self, values: StateValues, sums: Tensor, step: Tensor, batch: Nest, due: tuple[int, ...]
    ) -> tuple[StateValues, Tensor]:
        """Returns the values after a step, and the sums including this step.

        Args:
            values: the values of all variables.
            sums: the sums over earlier steps, (size,) float32.
            step: the number of steps done, () int32.
            batch: the global batch.
            due: the indices of the objectives to train in this step.
        """
        results, sums_of_groups = [], []
        before = values
        for index, one in enumerate(self._steps):
            if index in due:
                results.append(one.train(before, values, step, batch))
                values = results[-1].values
                sums_of_groups.append(results[-1].sums)
            else:
                sums_of_groups.append(one.create_idle_sums())
        finite = functools.reduce(jnp.logical_and, [result.finite for result in results])
        values = values._replace(averages=self._update_averages(before, values, finite))
        norm = jnp.sqrt(sum(result.norm**2 for result in results))
        skipped = 1.0 - finite.astype("float32")
        metrics = [value for result in results for value in result.metrics]
        return values, sums + self.sums.build_vector(1, norm, skipped, sums_of_groups, metrics)

    def check_constants(self) -> None:
        """Raises `UserError` if a variable that the program contains as a constant has changed."""
        for variable, value in (pair for one in self._steps for pair in one.constants):
            if variable.value is not value:
                raise UserError(
                    f"The loss reads the variable {variable.path!r}, which has changed but is not "
                    "part of the model. On JAX, a compiled step keeps the first value of such a "
                    "variable. Make it an attribute of the model, with trainable=False."
                )

    def _update_averages(
        self, before: StateValues, values: StateValues, finite: Tensor
    ) -> list[Any]:
        momentum = self.state.options.ema_momentum
        if momentum is None:
            return []
        new = [
            average - (average - value) * (1.0 - momentum)
            for average, value in zip(before.averages, values.trainable)
        ]
        if all(group.scaler is None for group in self.state.groups):
            return new
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, before.averages)
