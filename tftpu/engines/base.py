"""Shared parts of both engines: dividing data into shards, and reading the state of a run."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tftpu.config import TrainConfig
from tftpu.engines import checks, keras_internals
from tftpu.engines.data import conversion
from tftpu.engines.data.gate import Gate
from tftpu.engines.data.streams import SlicedArrays, Stream
from tftpu.engines.engine import Epoch
from tftpu.engines.leaf import Leaf
from tftpu.engines.objectives.losses import Losses, count_examples
from tftpu.engines.objectives.objective import Objective
from tftpu.engines.objectives.parameter_groups import build_compiled_group, build_parameter_groups
from tftpu.engines.objectives.sums import TrainSums
from tftpu.tensors import Nest, ops


class BaseEngine:
    """The part of `tftpu.engines.engine.Engine` that only needs the number of shards.

    Attributes:
        data_shards: number of shards that a global batch is divided into.
    """

    data_shards: int

    def epoch(self, dataset: Any, endless: bool = False) -> Epoch | None:
        """Returns the length of one pass; None for a stream or, with `endless`, endless data."""
        if isinstance(dataset, SlicedArrays):
            return Epoch(dataset.steps, count_examples(dataset.symbols))
        if isinstance(dataset, Stream) or (endless and conversion.is_endless(dataset)):
            return None
        return conversion.measure_length(dataset)

    def training_spec(
        self,
        dataset: Any,
        microbatches: int = 1,
        class_weight: dict[int, float] | None = None,
    ) -> Nest:
        """Returns the spec of one shard of each complete global batch of training."""
        if isinstance(dataset, Stream):  # its batches may differ in size: describes the first one
            spec = dataset.spec
            return self.last_spec(spec, count_examples(spec), microbatches)
        spec = conversion.build_training(dataset, 0, class_weight).element_spec
        # Each host reads its shard of a pipeline's batch, so padding cannot fill up the batch.
        divided = isinstance(dataset, conversion.Pipeline)
        divided = divided and not isinstance(dataset, conversion.Epochs)
        if not divided:
            spec = conversion.round_up(spec, self.data_shards * microbatches)
        return conversion.build_shard_spec(spec, self.data_shards, microbatches)

    def count_examples(self, dataset: Any) -> int:
        """Returns the number of examples of a complete global batch."""
        if isinstance(dataset, Stream):
            return count_examples(dataset.symbols)
        return count_examples(conversion.build_training(dataset, 0).element_spec)

    def last_spec(self, spec: Nest, examples: int, microbatches: int = 1) -> Nest:
        """Returns the spec of one shard of the smaller batch that an epoch ends with."""
        parts = self.data_shards * microbatches
        whole = conversion.round_up(conversion.replace_examples(spec, examples), parts)
        return conversion.build_padded_shard_spec(whole, self.data_shards)

    def building_spec(self, shard_spec: Nest) -> Nest:
        """Returns the spec of the batch that a step passes to the model, which is one shard."""
        return shard_spec

    def whole_batches(
        self,
        dataset: Any,
        position: int,
        class_weight: dict[int, float] | None = None,
        epoch: Epoch | None = None,
        gate: Gate | None = None,
    ) -> Iterator[Any]:
        """Returns an endless iterator over undivided batches, for a model's own steps."""
        return self._iterate(conversion.build_whole(dataset, position, epoch, class_weight, gate))

    def _iterate(self, batches: Any) -> Iterator[Any]:
        raise NotImplementedError

    def evaluation_spec(self, dataset: Any) -> Nest:
        """Returns the spec of the padded global batches of an evaluation."""
        if isinstance(dataset, Stream):
            return conversion.round_up(dataset.spec, self.data_shards)
        return conversion.build_evaluation_spec(dataset, self.data_shards)

    def whole_spec(self, dataset: Any, class_weight: dict[int, float] | None = None) -> Nest:
        """Returns the spec of a whole batch as `keras.KerasTensor`s, for a model's own steps."""
        if isinstance(dataset, Stream):
            return dataset.symbols
        batches = conversion.build_whole(dataset, 0, None, class_weight)
        return keras.tree.map_structure(
            lambda s: keras.KerasTensor(tuple(s.shape), s.dtype.name), batches.element_spec
        )


class BaseState:
    """The variables of a model that a run trains, and its objectives.

    Args:
        model: the model, compiled unless there are objectives; this builds it if needed.
        batch_spec: the spec of a batch: `(x, y)` or `(x, y, sample_weight)` of `tf.TensorSpec`s
            with static shapes, nested as the model takes them.
        options: options of the step.
        objectives: the objectives that replace the compiled loss and optimizer.
        labelled: whether batches have labels; without them `groups` is empty.

    Attributes:
        model: the Keras model.
        options: options of the step.
        compiled: whether the only objective is the compiled loss.
        groups: the objectives in the order of a step; a compiled loss counts as one.
        drawn_apart: the states of the seed generators whose random numbers differ between replicas
            and between microbatches.
        drawn_by_example: the states of the seed generators whose random numbers depend on an
            example's position in the global batch.

    Raises:
        UserError: the model cannot be trained as it is.
    """

    def __init__(
        self,
        model: keras.Model,
        batch_spec: Nest,
        options: TrainConfig,
        objectives: Sequence[Objective] = (),
        labelled: bool = True,
    ):
        checks.refuse_model(model, objectives, labelled)
        keras.tree.map_structure(checks.refuse_spec, batch_spec)
        symbolic = keras.tree.map_structure(
            lambda s: keras.KerasTensor(tuple(s.shape), s.dtype.name), batch_spec
        )
        self.model = model
        self.options = options
        self.compiled = not objectives
        if objectives:
            self.groups = build_parameter_groups(model, objectives, symbolic)
        elif not labelled:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(symbolic)
            keras_internals.build_by(lambda given: model(given, training=False), x)
            self.groups = []
        else:
            keras_internals.build(model, symbolic)
            # This reads the values of metrics' states, which are unknown inside a trace.
            with self._outside_of_traces():
                self.groups = [build_compiled_group(model)]
        with self._outside_of_traces():  # Keras makes no default generator in a trace
            self.drawn_apart = keras_internals.list_seed_states(model)
        self.drawn_by_example = keras_internals.list_example_seeds(model)

    def _outside_of_traces(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that computes values immediately, even while a step is traced."""
        return contextlib.nullcontext()

    @property
    def seed_states(self) -> list[keras.Variable]:
        """The states of all seed generators."""
        return [*self.drawn_apart, *self.drawn_by_example]

    @property
    def losses(self) -> list[Losses]:
        """The losses of each objective."""
        return [group.losses for group in self.groups]

    def list_untrained(self) -> list[keras.Variable]:
        """Returns the variables that are neither trained nor states of seed generators."""
        seeds = {id(v) for v in self.seed_states}
        return [v for v in self.model.non_trainable_variables if id(v) not in seeds]

    def group_variables(self) -> dict[str, list[keras.Variable]]:
        """Returns the variables of the model and of the optimizers, by group of a checkpoint."""
        seeds = {id(v) for v in self.seed_states}
        groups = {"model": [v for v in self.model.variables if id(v) not in seeds]}
        for number, group in enumerate(self.groups):
            if group.owner != number:
                continue
            suffix = f"_{group.name}" if group.name else ""
            own = {id(v) for v in group.optimizer.variables}
            groups[f"optimizer{suffix}"] = list(group.optimizer.variables)
            # A separate group, because a run may resume in a precision without a loss scale.
            if group.scaler is not None:
                found = [v for v in group.scaler.variables if id(v) not in own]
                groups[f"loss_scale{suffix}"] = found
        return groups

    def list_leaves(self) -> dict[str, list[Leaf]]:
        """Returns all variables that a checkpoint holds, by group."""
        raise NotImplementedError

    def has_diverged(self, layout: TrainSums, sums: np.ndarray) -> bool:
        """Returns whether the sums of a device loop show a loss that is no longer finite.

        With a dynamic loss scale, single steps may overflow. A loss has diverged only if all steps
        overflow at the smallest scale.

        Args:
            layout: the layout of the sums.
            sums: the sums of the loop, (size,).
        """
        scaled = [group.scaler for group in self.groups if group.scaler is not None]
        if not scaled:
            return not layout.is_finite(sums)
        least = min(float(ops.convert_to_numpy(s.dynamic_scale)) for s in scaled)
        return layout.has_only_skipped(sums) and least <= 1.0


class BaseExecutor:
    """The part of `tftpu.engines.engine.Executor` that reads the state of a run.

    Attributes:
        variables: the variables of the run, a `BaseState`.
    """

    variables: Any

    @property
    def optimizer_name(self) -> str:
        """The class name of the (first) optimizer."""
        return type(self.variables.groups[0].optimizer).__name__

    @property
    def learning_rate(self) -> float:
        """The learning rate of the (first) optimizer at this step."""
        return float(ops.convert_to_numpy(self.variables.groups[0].optimizer.learning_rate))

    def training(self, shard_spec: Nest, examples: int | None = None) -> Any:
        """Returns the train loop for batches whose shards have this spec."""
        raise NotImplementedError

    def bare(self, shard_spec: Nest, batch: Any) -> Callable[[int], None]:
        """Returns a function that runs a number of training steps on one batch."""
        return self.training(shard_spec).bare(batch)

    def begin_epoch(self) -> None:
        """Does nothing, because each device loop returns separate sums."""

    def finish_epoch(self, sums: np.ndarray) -> np.ndarray:
        """Returns the sums of an epoch's steps unchanged, because nothing has to be added."""
        return sums

    def finish_training(self) -> None:
        """Does nothing, because a run has no work after its last step."""

    def check_evaluation(self, batch_spec: Nest, dataset: Any) -> None:
        """Traces an evaluation, so that an error appears before training starts."""
        self._is_separable(batch_spec)
        self._check_evaluated(dataset)

    def _check_evaluated(self, dataset: Any) -> None:
        raise NotImplementedError

    def _is_separable(self, batch_spec: Nest) -> bool:
        raise NotImplementedError

    def state(self) -> dict[str, list[Leaf]]:
        """Returns all variables that a checkpoint holds, by group."""
        return self.variables.list_leaves()


class BaseTrainLoop:
    """The part of `tftpu.engines.engine.TrainLoop` that only needs the train step.

    Args:
        step: the train step that it runs.
    """

    def __init__(self, step: Any):
        self.step = step
        self._compiled = False

    @property
    def model_flops(self) -> int:
        """The model FLOPs of a global batch, forward and backward."""
        return self.step.model_flops

    def compiled(self, batches: Iterator[Any]) -> bool:
        """Returns whether the device loop is compiled, which does not depend on the batches."""
        return self._compiled

    def diverged(self, sums: np.ndarray) -> bool:
        """Returns whether the sums of a loop show a loss that is no longer finite."""
        return self.step.state.has_diverged(self.step.sums, sums)
