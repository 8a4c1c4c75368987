"""A compiled Keras model on a TensorFlow strategy: training, evaluation, prediction, state."""

import collections
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu import sharding
from tftpu.config import TrainConfig
from tftpu.engines.base import BaseExecutor, BaseTrainLoop
from tftpu.engines.data import conversion
from tftpu.engines.data.batches import data_errors, warn_if_endless
from tftpu.engines.data.outputs import iterate_ahead, keep_examples
from tftpu.engines.data.streams import Stream, to_arrays
from tftpu.engines.engine import BatchHooks, LoopResult
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.objectives.objective import Objective
from tftpu.engines.objectives.sums import EvalSums, TrainSums
from tftpu.engines.tensorflow import feed, functions, internals, mixing
from tftpu.engines.tensorflow.state import ModelState
from tftpu.engines.tensorflow.step.eval_step import EvalStep
from tftpu.engines.tensorflow.step.loops import (
    build_device_loop,
    build_repeat_loop,
    wrap_for_platform,
)
from tftpu.engines.tensorflow.step.train_step import TrainStep
from tftpu.engines.tensorflow.whole_batches import WholeBatches
from tftpu.errors import UserError
from tftpu.tensors import Nest


class TensorFlowExecutor(BaseExecutor):
    """The executor of a model on a strategy; see `tftpu.engines.engine.Executor`.

    Args:
        strategy: the strategy in whose scope the model was built.
        platform: the platform of the devices, "tpu"; None: GPUs or CPUs.
        model: the compiled model.
        options: the options of the train step.
        batch_spec: the spec of one shard of a batch, with which an unbuilt model is built.
        objectives: the objectives that replace the compiled loss and optimizer.
        labelled: whether batches have labels; without them the model only predicts.
    """

    variables: ModelState

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        platform: str | None,
        model: keras.Model,
        options: TrainConfig,
        batch_spec: Nest,
        objectives: Sequence[Objective] = (),
        labelled: bool = True,
    ):
        self._strategy: Any = strategy
        self._platform = platform
        with sharding.compiling_for(platform), strategy.scope():
            self.variables = ModelState(model, batch_spec, options, objectives, labelled)
            self._eval_step = EvalStep(self.variables)
        self.train_sums = TrainSums(self.variables.groups)
        self.eval_sums: EvalSums = self._eval_step.sums
        self.evaluation_compiled = False
        shards = strategy.num_replicas_in_sync
        evaluate = wrap_for_platform(
            platform, lambda pair: self._eval_step.evaluate(pair[0], pair[1], shards)
        )
        self._eval_loop = build_device_loop(strategy, evaluate)
        self._separable: dict[str, bool] = {}
        # Whether the examples of an evaluated batch depend on each other; None: unknown yet.
        self._mixes: bool | None = None
        self._eval_whole = WholeBatches(strategy, platform, self._eval_step)
        step = wrap_for_platform(platform, self._eval_step.predict)

        def predict(iterator):
            batch, valid = next(iterator)
            return self._strategy.run(
                lambda x: (step(x), valid), args=(conversion.extract_features(batch),)
            )

        self._predict = internals.build_graph_function(predict)
        self._predict_batch = self._compile_on_replicas(step)
        self._weight_norm = self._compile_on_replicas(self._eval_step.compute_weight_norm)

    @property
    def step(self) -> int:
        """The number of training steps done, including skipped steps."""
        return int(self.variables.step.numpy())

    @property
    def weight_norm(self) -> float:
        """The global norm of the trainable weights, which is the same on every replica."""
        return float(self._read_local(self._weight_norm()))

    def begin_at(self, step: int) -> None:
        """Sets the number of training steps done, as if all steps before `step` were trained."""
        self.variables.step.assign(step)

    def warn_of_mixing(self, dataset: Any, class_weight: dict[int, float] | None = None) -> None:
        """Warns if examples of a batch affect each other; rejects metrics that cannot be summed."""
        batches = functools.partial(conversion.build_training, dataset, 0, class_weight)
        with sharding.compiling_for(self._platform), self._strategy.scope():
            mixing.check_metrics(self.variables, batches)
            mixing.warn_of_mixing(self.variables, batches)

    def training(self, shard_spec: Nest, examples: int | None = None) -> "TensorFlowTrainLoop":
        """Returns the train loop for batches whose shards have this spec."""
        replicas = self.variables.replicas
        parts = replicas * self.variables.options.gradient_accumulation_steps
        uneven = examples if examples is not None and examples % parts else None
        with sharding.compiling_for(self._platform), self._strategy.scope():
            step = TrainStep(self.variables, shard_spec, uneven)
        held = count_examples(shard_spec) if examples is None else -(-examples // replicas)
        return TensorFlowTrainLoop(self._strategy, self._platform, step, held)

    def evaluate(
        self,
        dataset: Any,
        compiling: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        hooks: BatchHooks | None = None,
    ) -> np.ndarray:
        """Returns a finite data set's loss and metric sums, (size,) float64; see `eval_sums`."""
        accumulator = self._eval_step.accumulator
        self._check_evaluated(dataset)
        if (
            isinstance(dataset, Stream)
            or self._mixes
            or not self._is_separable(
                conversion.build_evaluation_spec(dataset, self._strategy.num_replicas_in_sync)
            )
        ):
            accumulator.drain()
            with compiling() if not self.evaluation_compiled else contextlib.nullcontext():
                batches = self._eval_whole.run(dataset, divides=not self._mixes)
                sums = self._add_up(batches, None, hooks)
            self.evaluation_compiled = True
            return sums
        batches, count = feed.build_evaluation_batches(dataset, self._strategy)
        iterator = feed.iterate(feed.distribute(batches, self._strategy))
        accumulator.drain()
        with compiling():
            self._eval_loop.get_concrete_function(iterator, tf.constant(1))
        with data_errors():
            if count is not None and hooks is None:
                self._eval_loop(iterator, tf.constant(count))
                sums = accumulator.drain()
            else:
                batches = self._evaluate_each(iterator, count)
                counted = warn_if_endless(batches, count, dataset=dataset)
                sums = self._add_up(counted, count, hooks)
        self.evaluation_compiled = True
        return sums

    def predictions(self, dataset: Any, ahead: bool = True) -> Iterator[Nest]:
        """Yields the outputs of each batch of a finite data set, in order, as NumPy arrays.

        Raises:
            UserError: several hosts train together.
        """
        if isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise UserError("predict works on one host only: restore the checkpoint on one host.")
        if isinstance(dataset, Stream):
            for batch in dataset.iterate():
                yield self.predict_batch(conversion.extract_features(to_arrays(batch)))
            return
        batches = conversion.build_evaluation(dataset, self._strategy.num_replicas_in_sync)

        def compute_outputs() -> Iterator[Any]:
            with data_errors():
                iterator = feed.iterate(feed.distribute(batches, self._strategy))
                with contextlib.suppress(tf.errors.OutOfRangeError):
                    while True:
                        yield self._predict(iterator)

        outputs = iterate_ahead(compute_outputs()) if ahead else compute_outputs()
        for found in warn_if_endless(outputs, int(batches.cardinality()), dataset=dataset):
            parts: Any = keras.tree.map_structure(lambda t: self._gather(t).numpy(), found)
            computed, valid = parts
            yield keras.tree.map_structure(lambda t, v=valid: keep_examples(t, v), computed)

    def predict_batch(self, x: Nest) -> Nest:
        """Returns the outputs for one batch, which every replica receives in full."""
        outputs = self._predict_batch(keras.tree.map_structure(tf.convert_to_tensor, x))
        return keras.tree.map_structure(lambda value: self._read_local(value).numpy(), outputs)

    def compiled(
        self, function: Callable[..., Any], replaces_state: bool = False
    ) -> Callable[..., Any]:
        """Compiles a function to one program, which uses the same weights as evaluation."""
        state = self.variables
        return functions.compile_function(
            state.model,
            function,
            self._strategy,
            state.select_evaluated_weights,
            replaces_state,
        )

    def averaged_weights(self) -> dict[str, np.ndarray]:
        """Returns the averages of the trainable weights by path; empty without weight averages."""
        variables = self.variables.model.trainable_variables
        return {v.path: a.numpy() for v, a in zip(variables, self.variables.averages)}

    def _check_evaluated(self, dataset: Any) -> None:
        """Tests, at the first evaluation, if metrics can be summed and examples are independent."""
        if self._mixes is not None:
            return
        build = functools.partial(conversion.build_whole_evaluation, dataset)
        with sharding.compiling_for(self._platform), self._strategy.scope():
            mixing.check_metrics(self.variables, build)
            self._mixes = mixing.is_mixed_in_evaluation(self.variables, build)

    def _evaluate_each(self, iterator: Any, count: int | None) -> Iterator[None]:
        """Evaluates the batches of an iterator; yields None after each batch."""
        one = tf.constant(1)
        with contextlib.suppress(tf.errors.OutOfRangeError, StopIteration):
            for _ in itertools.count() if count is None else range(count):
                self._eval_loop(iterator, one)
                yield

    def _add_up(
        self, batches: Iterator[None], count: int | None, hooks: BatchHooks | None
    ) -> np.ndarray:
        """Evaluates batches one by one; returns the sums as `evaluate` does.

        Args:
            batches: an iterator that evaluates a batch for each item.
            count: the number of batches; None: unknown.
            hooks: callbacks to call before and after every `hooks.every` batches.
        """
        drain = self._eval_step.accumulator.drain
        if hooks is None:
            collections.deque(batches, maxlen=0)
            return drain()
        sums, first = drain(), 0
        while count is None or first < count:
            hooks.begin(first)
            if not list(itertools.islice(batches, hooks.every)):
                break
            sums = sums + drain()
            if hooks.end(first, sums):
                break
            first += hooks.every
        return sums

    def _is_separable(self, batch_spec: Nest) -> bool:
        """Returns whether padding leaves every result of an evaluation unchanged."""
        shard = conversion.build_padded_shard_spec(batch_spec, self._strategy.num_replicas_in_sync)
        key = str(shard)
        if key not in self._separable:
            with sharding.compiling_for(self._platform), self._strategy.scope():
                self._separable[key] = self._eval_step.is_separable(shard)
        return self._separable[key]

    def _compile_on_replicas(self, function: Callable[..., Any]) -> Any:
        return internals.build_graph_function(lambda *args: self._strategy.run(function, args=args))

    def _read_local(self, value: Any) -> Any:
        """Returns the first replica's copy of a value."""
        return self._strategy.experimental_local_results(value)[0]

    def _gather(self, value: Any) -> tf.Tensor:
        parts = self._strategy.experimental_local_results(value)
        return tf.concat(parts, 0) if len(parts) > 1 else parts[0]


class TensorFlowTrainLoop(BaseTrainLoop):
    """The loop that runs the train step on a strategy; see `tftpu.engines.engine.TrainLoop`.

    Args:
        strategy: the strategy that runs the step.
        platform: the platform of the devices, "tpu"; None: GPUs or CPUs.
        step: the train step.
        examples: the number of examples of a shard to train on; any others are padding.

    Attributes:
        step: the train step.
    """

    step: TrainStep

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        platform: str | None,
        step: TrainStep,
        examples: int,
    ):
        super().__init__(step)

        def train(batch, due=None):
            padded = count_examples(batch) > examples
            cut = keras.tree.map_structure(lambda t: t[:examples] if padded else t, batch)
            step.train(cut, due)

        self._strategy = strategy
        self._train = wrap_for_platform(platform, train)
        self._loop = build_device_loop(strategy, self._train, step.synchronise, step.turns)

    def run(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps on the devices."""
        with data_errors():
            waited = self._loop(batches, tf.constant(steps))
        self._compiled = True
        return LoopResult(self.step.accumulator.drain(), float(waited), steps)

    def run_each(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps on whole batches in host memory."""
        waited, done, asked = 0.0, 0, time.monotonic()
        for batch in itertools.islice(batches, steps):
            waited += time.monotonic() - asked
            self._repeat(feed.split_shards(batch, self._strategy), tf.constant(1))
            done, asked = done + 1, time.monotonic()
        self._compiled = True
        return LoopResult(self.step.accumulator.drain(), waited, done)

    @functools.cached_property
    def _repeat(self) -> Any:
        return build_repeat_loop(self._strategy, self._train, self.step.synchronise)

    def bare(self, batch: Any) -> Callable[[int], None]:
        """Returns a function that runs a number of steps on one batch, and waits for them."""

        def run(steps: int) -> None:
            self._repeat(batch, tf.constant(steps))
            self.step.accumulator.drain()  # waits until the devices are done

        return run
