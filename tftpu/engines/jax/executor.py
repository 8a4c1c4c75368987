"""A compiled Keras model on a mesh: training, evaluation, prediction, state."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from tftpu.config import TrainConfig
from tftpu.engines import checks
from tftpu.engines.base import BaseExecutor, BaseTrainLoop
from tftpu.engines.data import conversion
from tftpu.engines.data.batches import fill_up, warn_if_endless
from tftpu.engines.data.outputs import group_batches, iterate_ahead, keep_examples
from tftpu.engines.data.streams import Stream, to_arrays
from tftpu.engines.engine import BatchHooks, LoopResult, explain_size
from tftpu.engines.jax import feed, functions
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.placement import placing
from tftpu.engines.jax.placement.mesh import BatchShard
from tftpu.engines.jax.state import JaxState
from tftpu.engines.jax.step.eval_step import EvalStep
from tftpu.engines.jax.step.train_step import TrainStep
from tftpu.engines.jax.step.update import compute_global_norm
from tftpu.engines.jax.tracing import tracing_for
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.objectives.objective import Objective
from tftpu.engines.objectives.sums import EvalSums, TrainSums
from tftpu.errors import UserError
from tftpu.tensors import Nest


class JaxExecutor(BaseExecutor):
    """See `tftpu.engines.engine.Executor`.

    Args:
        mesh: the devices.
        part: the part of each global batch that this process feeds.
        platform: the platform of the devices: "tpu", "gpu" or "cpu".
        model: the compiled model.
        options: the options of the train step.
        batch_spec: the spec of a batch, which builds the model if needed.
        objectives: the objectives that replace the compiled loss and optimizer.
        labelled: whether batches have labels; without them the model only predicts.
        compiler_options: XLA's options for the train step, by name.
    """

    variables: JaxState

    def __init__(
        self,
        mesh: Mesh,
        part: BatchShard,
        platform: str,
        model: keras.Model,
        options: TrainConfig,
        batch_spec: Nest,
        objectives: Sequence[Objective] = (),
        labelled: bool = True,
        compiler_options: dict[str, str] | None = None,
    ):
        self._part = part
        self._platform = platform
        self._compiler_options = compiler_options or {}
        with tracing_for(platform, mesh):
            self.variables = JaxState(mesh, model, batch_spec, options, objectives, labelled)
        self.variables.place()
        self._shards = meshes.count_batch_shards(mesh)
        self._eval_step = EvalStep(self.variables)
        self.train_sums = TrainSums(self.variables.groups)
        self.eval_sums: EvalSums = self._eval_step.sums
        self.evaluation_compiled = False
        self._metrics_checked = False
        self._separable: dict[str, bool] = {}
        whole = self.variables.layout.whole
        self._evaluate = self._compile_function(self._eval_step.evaluate, out_shardings=whole)
        # Every host gets all outputs of the model.
        gathered = {"out_shardings": whole} if mesh.is_multi_process else {}
        self._predict = self._compile_function(self._eval_step.predict, **gathered)
        self._weight_norm = jax.jit(compute_global_norm, out_shardings=whole)

    @property
    def step(self) -> int:
        """The number of training steps done, including skipped steps."""
        return self.variables.step

    @property
    def weight_norm(self) -> float:
        """The global norm of the trainable weights."""
        return float(self._weight_norm(self.variables.read_trained_values()))

    def begin_at(self, step: int) -> None:
        """Sets the number of training steps done, as if all steps before `step` were trained."""
        self.variables.step = step

    def warn_of_mixing(self, dataset: Any, class_weight: dict[int, float] | None = None) -> None:
        """Warns of layers that normalize each microbatch; rejects metrics that cannot be summed.

        Each microbatch is computed as a whole, on any number of devices. So results may depend on
        the number of microbatches, but not on the number of devices.
        """
        if self.variables.options.gradient_accumulation_steps > 1:
            checks.warn_of_batch_statistics(self.variables.model)
        batches = functools.partial(conversion.build_training, dataset, 0, class_weight)
        self._eval_step.check_metrics(lambda: next(feed.iterate_arrays(batches())))

    def training(self, shard_spec: Nest, examples: int | None = None) -> "JaxTrainLoop":
        """Returns the train loop for batches whose shards have this spec."""
        with tracing_for(self._platform, self.variables.layout.mesh):
            padded = self._shards * count_examples(shard_spec)
            step = TrainStep(self.variables, shard_spec, examples if examples != padded else None)
        return JaxTrainLoop(
            self.variables, self._part, self._platform, step, self._compiler_options
        )

    def evaluate(
        self,
        dataset: Any,
        compiling: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        hooks: BatchHooks | None = None,
    ) -> np.ndarray:
        """Returns the sums over a finite data set, (size,) float64; `eval_sums` reads them."""
        self._check_evaluated(dataset)
        items = self._iterate_evaluated(dataset)
        values, sums = self._eval_step.read_values(), self._make_zeros(self.eval_sums.size)
        with compiling() if not self.evaluation_compiled else contextlib.nullcontext():
            for first, group in group_batches(items, hooks.every if hooks else 1):
                if hooks is not None:
                    hooks.begin(first)
                    values = self._eval_step.read_values()  # again, as a callback may change them
                for batch, valid in group:
                    placed = (
                        self._place_batch(batch),
                        None if valid is None else self._place_batch(valid),
                    )
                    before, sums = sums, self._evaluate(values, sums, *placed)
                    # On a CPU, a device that runs many batches ahead of the others would cause a
                    # deadlock.
                    jax.block_until_ready(before)
                if hooks is not None and hooks.end(first, np.asarray(sums, np.float64)):
                    break
            self.evaluation_compiled = True
        return np.asarray(sums, np.float64)

    def predictions(self, dataset: Any, ahead: bool = True) -> Iterator[Nest]:
        """Yields the outputs of each batch of a finite data set, in order, as NumPy arrays."""
        if isinstance(dataset, Stream):
            for batch in dataset.iterate():
                yield self.predict_batch(conversion.extract_features(to_arrays(batch)))
            return
        padded = conversion.build_evaluation(dataset, self._shards)
        batches = feed.iterate_arrays(padded)

        def compute_outputs() -> Iterator[tuple[Nest, Any]]:
            for batch, valid in batches:
                x = self._place_batch(conversion.extract_features(batch))
                yield self._compute_outputs(x), valid

        found = iterate_ahead(compute_outputs()) if ahead else compute_outputs()
        for outputs, valid in warn_if_endless(found, int(padded.cardinality()), dataset=dataset):
            yield jax.tree.map(lambda t, v=valid: keep_examples(np.asarray(t), v), outputs)

    def predict_batch(self, x: Nest) -> Nest:
        """Returns the outputs for one batch of features of any size, as NumPy arrays."""
        given = keras.tree.map_structure(np.asarray, x)
        return jax.tree.map(np.asarray, self._compute_outputs(given))

    def _compute_outputs(self, x: Nest) -> Nest:
        """Returns the outputs on the devices, and advances the seeds of random layers."""
        states = self.variables.seed_states
        # Keras's global generator may be on the devices of another engine.
        seeds = [placing.place_value(v.value, self.variables.layout.whole) for v in states]
        outputs, new = self._predict(self._eval_step.read_values(), seeds, x)
        for variable, value in zip(states, new):
            variable.assign(value)
        return outputs

    def compiled(
        self, function: Callable[..., Any], replaces_state: bool = False
    ) -> Callable[..., Any]:
        """Compiles a function to one program, which uses the same weights as evaluation."""
        state = self.variables
        tracing = functools.partial(tracing_for, self._platform, state.layout.mesh)
        return functions.compile_function(
            state.model, function, tracing, state.select_evaluated_weights, replaces_state
        )

    def averaged_weights(self) -> dict[str, np.ndarray]:
        """Returns the averages of the trainable weights by path; empty without weight averages.

        Raises:
            UserError: the weights are divided among several hosts.
        """
        if self.variables.layout.mesh.is_multi_process:
            raise UserError(
                "The weights are divided among several hosts. Export them on one machine from a "
                "checkpoint, with `tftpu export-weights` or with a Trainer that restores it."
            )
        variables = self.variables.model.trainable_variables
        return {v.path: np.asarray(a) for v, a in zip(variables, self.variables.averages)}

    def _check_evaluated(self, dataset: Any) -> None:
        """Raises `OwnStepsNeeded`, at the first evaluation, for metrics that cannot be summed."""
        if not self._metrics_checked:
            whole = conversion.build_whole_evaluation(dataset)
            self._eval_step.check_metrics(lambda: next(feed.iterate_arrays(whole)))
            self._metrics_checked = True

    def _iterate_evaluated(self, dataset: Any) -> Iterator[tuple[Nest, Any]]:
        """Returns an iterator over pairs of a batch and its padding mask (None without padding)."""
        if isinstance(dataset, Stream):
            return ((to_arrays(batch), None) for batch in dataset.iterate())
        padded = conversion.build_evaluation(dataset, self._shards)
        spec: Any = padded.element_spec
        if self._is_separable(spec[0]):
            batches = feed.iterate_arrays(padded)
        else:  # padding would change the results
            whole = conversion.build_whole_evaluation(dataset)
            batches = ((batch, None) for batch in feed.iterate_arrays(whole))
        return warn_if_endless(batches, int(padded.cardinality()), dataset=dataset)

    def _is_separable(self, batch_spec: Nest) -> bool:
        """Returns whether padding leaves every result of an evaluation unchanged."""
        key = str(batch_spec)
        if key not in self._separable:
            with tracing_for(self._platform, self.variables.layout.mesh):
                self._separable[key] = self._eval_step.is_separable(feed.to_shapes(batch_spec))
        return self._separable[key]

    def _place_batch(self, batch: Nest) -> Nest:
        return feed.place_batch(batch, self.variables.layout, self._part)

    def _make_zeros(self, size: int) -> Any:
        return placing.place_value(np.zeros(size, np.float32), self.variables.layout.whole)

    def _compile_function(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def traced(*args):
            with tracing_for(self._platform, self.variables.layout.mesh):
                return function(*args)

        return jax.jit(traced, **options)


class JaxTrainLoop(BaseTrainLoop):
    """See `tftpu.engines.engine.TrainLoop`.

    Args:
        state: the variables.
        part: the part of each global batch that this process feeds.
        platform: the platform of the devices: "tpu", "gpu" or "cpu".
        step: the train step.
        compiler_options: XLA's options for the train step, by name.

    Attributes:
        step: the train step.
    """

    step: TrainStep

    def __init__(
        self,
        state: JaxState,
        part: BatchShard,
        platform: str,
        step: TrainStep,
        compiler_options: dict[str, str],
    ):
        self._state = state
        self._part = part
        super().__init__(step)

        def train(values, sums, number, batch, due):
            with tracing_for(platform, state.layout.mesh):
                return step.train(values, sums, number, batch, due)

        shardings = (state.shardings, state.layout.whole)
        self._train = jax.jit(
            train,
            static_argnums=4,
            donate_argnums=(0, 1),
            out_shardings=shardings,
            compiler_options=compiler_options,
        )

    def run(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps on the devices, while the host prepares the next batches."""
        state, waited = self._state, 0.0
        self.step.check_constants()
        values = state.read_values()
        sums = self._make_no_sums()
        done, asked = 0, time.monotonic()
        try:
            for found in itertools.islice(batches, steps):
                waited += time.monotonic() - asked
                batch = self._place(found)
                number = np.int32(state.step)
                values, sums = self._train(
                    values, sums, number, batch, self.step.select_due(state.step)
                )
                state.step += 1
                done, asked = done + 1, time.monotonic()
        finally:
            state.assign(values)
        self._compiled = True
        return LoopResult(np.asarray(sums, np.float64), waited, done)

    def run_each(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps on whole batches in host memory."""
        return self.run(batches, steps)

    def _place(self, batch: Nest) -> Nest:
        """Puts a batch from host memory on the devices, with padding up to the step's size."""
        layout, size = self.step.microbatching, count_examples(batch)
        if size * self._part.count == layout.padded != size:  # batch is this host's part
            return feed.place_shard(batch, self._state.layout, self._part)
        expected = layout.padded if layout.examples is None else layout.examples
        if size != expected:  # padding that the step does not expect would count as examples
            raise UserError(explain_size(expected, size))
        if layout.whole:
            return feed.place_batch(batch, self._state.layout, self._part)
        padded = feed.slice_shard(fill_up(batch, layout.padded), self._part)
        return feed.place_shard(padded, self._state.layout, self._part)

    def bare(self, batch: Any) -> Callable[[int], None]:
        """Returns a function that runs a number of steps on one batch, and waits for them."""
        state = self._state
        placed = self._place(batch)

        def run(steps: int) -> None:
            values = state.read_values()
            sums = self._make_no_sums()
            try:
                for _ in range(steps):
                    due = self.step.select_due(state.step)
                    values, sums = self._train(values, sums, np.int32(state.step), placed, due)
                    state.step += 1
            finally:
                state.assign(values)
            jax.block_until_ready(sums)

        return run

    def _make_no_sums(self) -> Any:
        return placing.place_value(
            np.zeros(self.step.sums.size, np.float32), self._state.layout.whole
        )
