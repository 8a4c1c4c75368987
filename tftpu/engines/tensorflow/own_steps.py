"""A model's own steps on one device, by the functions that Keras makes of them.

They are compiled, compiled by XLA or run eagerly, as the model was compiled.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import keras_internals
from tftpu.engines.data.batches import data_errors
from tftpu.engines.engine import LoopResult
from tftpu.engines.leaf import Leaf
from tftpu.engines.own_steps import (
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
    """See `tftpu.engines.engine.Executor`.

    Args:
        model: the model.
        batch_spec: a batch as `keras.KerasTensor`s, which builds the model if needed.
        labelled: whether batches have labels; without them the model only predicts.
    """

    def __init__(self, model: keras.Model, batch_spec: Nest, labelled: bool = True):
        super().__init__(model)
        self._step: Any = tf.Variable(tf.zeros((), tf.int64), trainable=False, name="step")
        self._outside: list[Any] = []
        if labelled:
            graph = _build(self.model, batch_spec)
            changed = _list_changed(graph) if graph else list_held(model, tf.Variable)
            known = {
                id(getattr(v, "value", v))
                for group in list_own_variables(model).values()
                for v in group
            }
            self._outside = [variable for variable in changed if id(variable) not in known]
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
        """Counts the steps before this one as done, although they were not trained."""
        self._step.assign(step)

    def train(self, batches: Iterator[Nest], steps: int) -> LoopResult:
        """Runs training steps.

        Args:
            batches: an iterator over whole batches.
            steps: the number of steps.
        """
        waited, logs, done = 0.0, {}, 0
        execution = count_execution_steps(self.model)
        self.model.make_train_function()
        with data_errors():
            while done < steps:
                asked = time.monotonic()
                count = min(steps - done, execution)
                group = list(itertools.islice(batches, count))
                waited += time.monotonic() - asked
                if not group:
                    break
                logs = self.model.train_function(map(_to_tensors, group))
                self._step.assign_add(len(group))
                done += len(group)
        return LoopResult(to_logs(logs), waited, done)

    def _test_group(self, group: list[Nest]) -> Any:
        self.model.make_test_function()
        return self.model.test_function(map(_to_tensors, group))

    def predictions(self, dataset: Any, ahead: bool = True) -> Iterator[Nest]:
        """Yields the outputs of each batch, in order, as NumPy arrays or ragged tensors."""
        self.model.make_predict_function()
        with data_errors():
            for _, group in self.iterate_groups(dataset):
                for batch in map(_to_tensors, group):
                    yield keras.tree.map_structure(_to_numpy, self.model.predict_function([batch]))

    def predict_batch(self, x: Nest) -> Nest:
        """Returns the outputs for one batch of features of any size, as NumPy arrays."""
        return self.model.predict_on_batch(x)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs as one program."""
        return functions.compile_function(self.model, function)

    def state(self) -> dict[str, list[Leaf]]:
        """Returns all variables that a checkpoint holds, by group."""
        groups = {**list_own_variables(self.model), "outside": self._outside}
        return build_leaves({**groups, "step": [self._step], "ema": []})

    def _iterate(self, batches: tf.data.Dataset) -> Iterator[Nest]:
        return iter(batches)


def _build(model: Any, batch_spec: Nest) -> Any:
    """Creates the variables of a model and of its step, before a checkpoint is restored.

    Returns:
        The graph of a step; None if it is not known before the first batch.
    """
    if model.run_eagerly:
        try:
            keras_internals.build(model, batch_spec)
        except Exception:  # its `call` may need values, or be missing: its first batch builds it
            logger.info("The model cannot be called without values.", exc_info=True)
    elif not keras_internals.overrides(model, "train_step"):
        keras_internals.build(model, batch_spec)
    parts = keras.tree.flatten(batch_spec)
    if model.run_eagerly or any(s is not None and (s.sparse or s.ragged) for s in parts):
        return None
    specs = keras.tree.map_structure(
        lambda s: None if s is None else tf.TensorSpec(s.shape, s.dtype), batch_spec
    )
    return tf.function(model.train_step, autograph=False).get_concrete_function(specs).graph


def _list_changed(graph: Any) -> list[tf.Variable]:
    """Returns the variables that a step changes."""
    try:
        return internals.list_changed_variables(graph)
    except LookupError as error:
        raise UserError(
            f"The model's own step changes a resource such as a queue or a table ({error}), "
            "which no checkpoint would hold. Keep the state in a variable, and read other data "
            "in the input pipeline."
        ) from error


def _to_tensors(batch: Nest) -> Nest:
    return keras.tree.map_structure(keras_internals.to_tensorflow, batch)


def _to_numpy(value: Any) -> Any:
    return value if isinstance(value, tf.RaggedTensor) else np.asarray(value)
