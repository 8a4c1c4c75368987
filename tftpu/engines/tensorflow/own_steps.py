"""Runs a model's own `train_step`, `test_step` and `predict_step` on TensorFlow.

On one device, Keras's functions run them: as `tf.function`, with XLA or eagerly, as chosen in
`compile`. On several devices, each computes the whole batch, with its own states of the metrics.
"""

import collections
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import checks, keras_internals
from tftpu.engines.data.batches import data_errors
from tftpu.engines.data.tuning import limit_tuning
from tftpu.engines.engine import LoopResult
from tftpu.engines.leaf import Leaf
from tftpu.engines.own_steps import (
    Logs,
    OwnStepsExecutor,
    count_execution_steps,
    list_held,
    list_own_variables,
    to_logs,
)
from tftpu.engines.tensorflow import functions, internals
from tftpu.engines.tensorflow.leaves import build_leaves
from tftpu.errors import UserError
from tftpu.tensors import Nest

logger = logging.getLogger(__name__)


class TensorFlowOwnSteps(OwnStepsExecutor):
    """The executor of a model's own steps on a strategy; see `tftpu.engines.engine.Executor`.

    Args:
        strategy: the strategy in whose scope the model was built.
        model: the model.
        batch_spec: a batch as `keras.KerasTensor`s, with which an unbuilt model is built.
        labelled: whether batches have labels; without them the model only predicts.

    Raises:
        UserError: a step on several devices changes a variable that is on only one of them, or a
            step changes a resource that is not a variable, such as a queue.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        batch_spec: Nest,
        labelled: bool = True,
    ):
        super().__init__(model)
        self._strategy: Any = strategy
        self._alone = strategy.num_replicas_in_sync == 1
        self._steps: dict[str, Callable[[Any], Any]] = {}
        self._step: Any = tf.Variable(tf.zeros((), tf.int64), trainable=False, name="step")
        self._outside: list[Any] = []
        if labelled:
            graph = _build(self.model, batch_spec, strategy)
            changed = _list_changed(graph) if graph else list_held(model, tf.Variable)
            known = {
                id(getattr(v, "value", v))
                for group in list_own_variables(model).values()
                for v in group
            }
            wholes = [(internals.find_whole_variable(copy), copy) for copy in changed]
            outside = {id(whole): (whole, copy) for whole, copy in wholes if id(whole) not in known}
            self._outside = [whole for whole, _ in outside.values()]
            if not self._alone:  # a variable that is not a replica's copy is on one device only
                single = [whole for whole, copy in outside.values() if whole is copy]
                checks.refuse_outside([repr(v.name) for v in single])
        else:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch_spec)
            keras_internals.build_by(lambda given: model(given, training=False), x)

    @property
    def step(self) -> int:
        """The number of training steps done."""
        return int(self._step.numpy())

    @property
    def weight_norm(self) -> float:
        """The global norm of the trainable weights."""
        return float(
            tf.linalg.global_norm([tf.cast(v, "float32") for v in self.model.trainable_variables])
        )

    def begin_at(self, step: int) -> None:
        """Sets the number of training steps done, as if all steps before `step` were trained."""
        self._step.assign(step)

    def train(self, batches: Iterator[Nest], steps: int) -> LoopResult:
        """Runs training steps.

        Args:
            batches: an iterator over whole batches.
            steps: the number of steps.
        """
        waited, logs, done = 0.0, {}, 0
        execution = count_execution_steps(self.model)
        train = self._build_step("train")
        with data_errors():
            while done < steps:
                asked = time.monotonic()
                count = min(steps - done, execution)
                group = list(itertools.islice(batches, count))
                waited += time.monotonic() - asked
                if not group:
                    break
                logs = train(map(_to_tensors, group))
                self._step.assign_add(len(group))
                done += len(group)
        return LoopResult(to_logs(logs), waited, done)

    def _test_group(self, group: list[Nest]) -> Any:
        return self._build_step("test")(map(_to_tensors, group))

    def begin_epoch(self) -> None:
        """Resets the running means of the logs."""
        with self._strategy.scope():
            super().begin_epoch()

    def finish_epoch(self, sums: Logs) -> Logs:
        """Returns the logs of an epoch: the metrics' results, if they have the names of `sums`."""
        if self._alone:
            return super().finish_epoch(sums)
        if "results" not in self._steps:
            select = functools.partial(keras_internals.select_metric_results, self.model)
            self._steps["results"] = self._build_step_on_each(select)
        logs = {name: tf.constant(value) for name, value in sums.items()}
        return to_logs(self._steps["results"]([logs]))

    def finish_training(self) -> None:
        """Overwrites the weights with their averages, if the optimizer is set to do so."""
        with self._strategy.scope():
            super().finish_training()

    def predictions(self, dataset: Any, ahead: bool = True) -> Iterator[Nest]:
        """Yields the outputs of each batch, in order, as NumPy arrays or ragged tensors."""
        predict = self._build_step("predict")
        with data_errors():
            for _, group in self.iterate_groups(dataset):
                for batch in map(_to_tensors, group):
                    yield keras.tree.map_structure(_to_numpy, predict([batch]))

    def predict_batch(self, x: Nest) -> Nest:
        """Returns the outputs for a batch of features of any size, as arrays or ragged tensors."""
        outputs = self._build_step("predict")([(_to_tensors(x),)])
        return keras.tree.map_structure(_to_numpy, outputs)

    def compiled(
        self, function: Callable[..., Any], replaces_state: bool = False
    ) -> Callable[..., Any]:
        """Compiles a function to one program."""
        return functions.compile_function(
            self.model, function, self._strategy, replaces_state=replaces_state
        )

    def state(self) -> dict[str, list[Leaf]]:
        """Returns the leaves of everything that a checkpoint saves, by group."""
        groups = {**list_own_variables(self.model), "outside": self._outside}
        return build_leaves({**groups, "step": [self._step], "ema": []})

    def _iterate(self, batches: tf.data.Dataset) -> Iterator[Nest]:
        return iter(limit_tuning(batches))

    def _build_step(self, kind: str) -> Callable[[Any], Any]:
        """Returns a function of batches, which runs a step on each and returns the last results."""
        if self._alone:
            getattr(self.model, f"make_{kind}_function")()
            return getattr(self.model, f"{kind}_function")
        if kind not in self._steps:
            self._steps[kind] = self._build_step_on_each(getattr(self.model, f"{kind}_step"))
        return self._steps[kind]

    def _build_step_on_each(self, step: Callable[[Nest], Any]) -> Callable[[Any], Any]:
        def compute(batch: Nest) -> Any:
            # A metric may return its variable as its result, with a different value per device.
            return keras.tree.map_structure(_read_variable, step(batch))

        def run(batch: Nest) -> Any:
            return self._strategy.run(compute, args=(batch,))

        # Without XLA, which expects all variables on the first device.
        compiled: Any = run
        if not self.model.run_eagerly:
            compiled = tf.function(run, autograph=False, reduce_retracing=True)

        def run_execution(batches: Iterable[Nest]) -> Any:
            with self._strategy.scope(), _alike(self._strategy):
                results = collections.deque(map(compiled, batches), maxlen=1)
            return self._read_first(results.pop())

        return run_execution

    def _read_first(self, results: Any) -> Any:
        """Returns the first device's copy of results, which are the same on all devices."""
        return keras.tree.map_structure(
            lambda value: self._strategy.experimental_local_results(value)[0], results
        )


def _build(model: Any, batch_spec: Nest, strategy: Any) -> Any:
    """Creates the variables of a model and of its step, before a checkpoint is restored.

    Returns:
        The graph of a step; None if it is not known before the first batch.
    """
    if model.run_eagerly:
        try:
            keras_internals.build(model, batch_spec)
        except Exception:  # a symbolic `call` fails, so the first batch builds the model
            logger.info("The model cannot be called on symbolic inputs.", exc_info=True)
    elif not keras_internals.overrides(model, "train_step"):
        keras_internals.build(model, batch_spec)
    parts = keras.tree.flatten(batch_spec)
    if model.run_eagerly or any(s is not None and (s.sparse or s.ragged) for s in parts):
        return None
    specs = keras.tree.map_structure(
        lambda s: None if s is None else tf.TensorSpec(s.shape, s.dtype), batch_spec
    )
    train = tf.function(lambda batch: strategy.run(model.train_step, (batch,)), autograph=False)
    with _alike(strategy):
        return train.get_concrete_function(specs).graph


@contextlib.contextmanager
def _alike(strategy: Any) -> Iterator[None]:
    """Makes replicas that all have the same batch train as one device does, in the block."""
    if strategy.num_replicas_in_sync == 1:
        yield
        return
    with keras_internals.unscaled_losses(), internals.averaged_gradients():
        yield


def _list_changed(graph: Any) -> list[tf.Variable]:
    """Returns the variables that the graph of a step changes.

    Raises `UserError` if the step changes another resource, such as a queue.
    """
    try:
        return internals.list_changed_variables(graph)
    except LookupError as error:
        raise UserError(
            f"The model's own step changes a resource such as a queue or a table ({error}), "
            "which a checkpoint cannot save. Keep the state in a variable, and read other data "
            "in the input pipeline."
        ) from error


def _to_tensors(batch: Nest) -> Nest:
    return keras.tree.map_structure(keras_internals.to_tensorflow, batch)


def _read_variable(value: Any) -> Any:
    value = value.value if isinstance(value, keras.Variable) else value
    return tf.identity(value) if isinstance(value, tf.Variable) else value


def _to_numpy(value: Any) -> Any:
    return value if isinstance(value, tf.RaggedTensor) else np.asarray(value)
