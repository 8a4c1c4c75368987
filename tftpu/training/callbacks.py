"""Calls Keras callbacks in a run of device loops.

If a callback has batch methods, a device loop has one step, unless `steps_per_execution` or
`steps_per_loop` is set.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from tftpu.amounts import format_metric
from tftpu.engines import keras_internals
from tftpu.engines.data.outputs import group_batches, join_outputs
from tftpu.engines.engine import BatchHooks, Executor
from tftpu.engines.own_steps import count_execution_steps
from tftpu.errors import KerasError, did_you_mean
from tftpu.training.batch_methods import watches_batches
from tftpu.training.progress import RunProgress

# Attributes of Keras's callbacks that change from epoch to epoch and are plain numbers.
_REMEMBERED = ("best", "wait", "cooldown_counter")
_REMEMBERING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)


# A function that returns an evaluation's batch hooks; its argument turns sums into logs.
BuildHooks = Callable[[Callable[[Any], dict[str, float]]], BatchHooks]
# A function that evaluates, with the batch hooks if there are any, and returns the results.
Evaluate = Callable[[BuildHooks | None], dict[str, float]]


class Callbacks:
    """The Keras callbacks of a run, in Keras's `CallbackList`, and their `History`.

    Args:
        callbacks: the callbacks, Keras's own or a user's.
        model: the model that they see.
        epochs: the number of epochs; if `fit` is given `steps`, of intervals between evaluations.
        steps: the number of steps of an epoch; None: it is unknown.
        execution: the number of batches between two calls of a batch method.

    Attributes:
        history: the `History` of the run.
        watches_batches: whether a callback has batch methods for training.
        ends_on_nan: whether a callback ends the run if the loss is not finite.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        epochs: int,
        steps: int | None,
        execution: int,
    ):
        self._model: Any = model
        self._begun = self._ended = False
        self._error: Exception | None = None
        self._logs: dict[str, float] | None = None  # the logs of the last epoch
        self._execution = execution
        # The values of Keras's callbacks when training begins, by callback and name.
        self._first: dict[str, dict[str, Any]] = {}
        self._remembering = [one for one in callbacks if _is_remembering(one)]
        self.stopped = False
        self._list = keras_internals.build_callback_list(list(callbacks), model, epochs, steps)
        self.history = keras_internals.find_history(self._list)
        self.watches_batches = watches_batches(callbacks, "train")
        # A TerminateOnNaN callback ends the run itself if the loss is not finite.
        kind = keras.callbacks.TerminateOnNaN
        self.ends_on_nan = any(isinstance(callback, kind) for callback in callbacks)

    @property
    def stopped(self) -> bool:
        """True if a callback ended the run, through `model.stop_training`."""
        return bool(self._model.stop_training)

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._model.stop_training = value

    def check_monitored(self, executor: Executor, evaluates: bool) -> None:
        """Raises or warns if a Keras callback monitors a value that will not be logged.

        Args:
            executor: the executor of the run.
            evaluates: whether the run has validation data.

        Raises:
            KerasError: Keras would raise an error after the first epoch.
        """
        trained, evaluated = executor.train_sums.result_names, executor.eval_sums.result_names
        if trained is None or evaluated is None:  # a model's own steps may log anything
            return
        names = [*trained, *(f"val_{name}" for name in evaluated if evaluates)]
        for callback in self._list.callbacks:
            if _has_user_code(callback):
                return
            if not isinstance(callback, _REMEMBERING):
                continue
            name, kind = callback.monitor, type(callback).__name__
            unlogged = f"{kind} monitors {name!r}, which is not logged.{did_you_mean(name, names)}"
            if not keras_internals.has_direction(callback):
                raise KerasError(
                    f"{kind} monitors {name!r}, but does not know whether larger or smaller "
                    "values are better: pass mode='max' or mode='min'."
                    if name in names
                    else unlogged
                )
            if name not in names and getattr(callback, "save_best_only", True):
                without = "" if evaluates else " There are no validation data."
                warnings.warn(f"{unlogged}{without} It will do nothing.", stacklevel=2)

    def begin(self, progress: RunProgress) -> None:
        """Tells the callbacks that training begins; restores their values and the history.

        Args:
            progress: the progress of the run so far, from which they are restored.
        """
        self._begun = True
        self._list.on_train_begin()  # also empties the epochs of the history
        self._first = {
            key: {name: vars(callback)[name] for name in _REMEMBERED if name in vars(callback)}
            for key, callback in self._list_named()
        }
        self.restore(progress)

    def restore(self, progress: RunProgress) -> None:
        """Sets the history and the callbacks' values to those in the progress of a run."""
        self.history.history, self.history.epoch = progress.history, progress.epochs
        # By class and monitored value, as a resumed run may have more callbacks, or fewer.
        saved: dict[str, list[dict[str, float]]] = {}
        for key, values in progress.callbacks.items():
            saved.setdefault(key.partition(" ")[2], []).append(values)
        for key, callback in self._list_named():
            alike = saved.get(key.partition(" ")[2])
            values = self._first[key] | (alike.pop(0) if alike else {})
            for name, value in values.items():
                setattr(callback, name, value)

    def begin_batch(self, batch: int) -> None:
        """Calls `on_train_batch_begin`; with batch methods, only if `batch` begins an execution."""
        if not self.watches_batches or batch % self._execution == 0:
            self._list.on_train_batch_begin(batch)

    def end_batch(self, batch: int, ends: bool, read_logs: Callable[[], dict[str, float]]) -> None:
        """Calls `on_train_batch_end`; with batch methods, only if `batch` ends an execution.

        Args:
            batch: the index of the batch in the epoch.
            ends: whether the epoch or the run ends with this batch.
            read_logs: a function that returns the means since the beginning of the epoch.
        """
        if not self.watches_batches:
            self._list.on_train_batch_end(batch)
            return
        first = batch // self._execution * self._execution
        last = first + self._execution - 1
        if ends or batch == last:
            # As in Keras, the index is that of a complete execution, even if the data end earlier.
            self._list.on_train_batch_end(last, read_logs())

    def begin_epoch(self, number: int, resumes: bool = False) -> None:
        """Tells the callbacks that an epoch begins.

        Args:
            number: the index of the epoch.
            resumes: whether the run resumes after the epoch began. What callbacks made of the
                learning rate is then in the checkpoint, so the rate stays as it is.
        """
        before = self._read_learning_rate() if resumes else None
        self._list.on_epoch_begin(number)
        if before is not None and self._read_learning_rate() not in (before, None):
            with contextlib.suppress(TypeError):  # a callback has set a schedule, which decides
                self._model.optimizer.learning_rate = before

    def _read_learning_rate(self) -> float | None:
        """Returns the learning rate of the model's optimizer; None without one rate."""
        optimizer = getattr(self._model, "optimizer", None)
        rate = getattr(optimizer, "learning_rate", None)  # a MultiOptimizer has several
        value: Any = None if rate is None else keras.ops.convert_to_numpy(rate)
        return None if value is None else float(value)

    def end_epoch(self, number: int, logs: dict[str, float]) -> None:
        """Tells the callbacks that an epoch ended.

        Args:
            number: the index of the epoch.
            logs: the logs of the epoch; those of the evaluation have Keras's prefix "val_".
        """
        self._list.on_epoch_end(number, logs)
        self._logs = logs

    def finish(self) -> None:
        """Calls `on_train_end` once; keeps an error of a callback, which `end` raises.

        Callbacks may change the weights, so the last checkpoint is saved afterwards.
        """
        if self._ended or not self._begun:
            return
        self._ended = True
        try:
            self._list.on_train_end(self._logs)
        except Exception as error:
            self._error = error

    def end(self, failed: bool) -> None:
        """Calls `on_train_end` unless it was called; then raises the error of a callback in it.

        Args:
            failed: whether an error ended training; as in Keras, `on_train_end` is not called then.
        """
        if not failed:
            self.finish()
        if self._error is not None:
            raise self._error

    def get_state(self) -> dict[str, dict[str, float]]:
        """Returns the values that Keras's callbacks keep across epochs, by callback and name."""
        return {
            key: {
                name: float(value)
                for name in _REMEMBERED
                if (value := getattr(callback, name, None)) is not None and math.isfinite(value)
            }
            for key, callback in self._list_named()
        }

    def run_evaluation(self, evaluate: Evaluate) -> dict[str, float]:
        """Runs an evaluation, with the callbacks' `on_test_*` methods; returns its results."""
        return _run_evaluation(self._list, self._model, evaluate)

    def _list_named(self) -> list[tuple[str, keras.callbacks.Callback]]:
        """Returns the callbacks with values to save, with keys that are the same after resuming."""
        return [
            (f"{index} {type(one).__name__} {getattr(one, 'monitor', '')}", one)
            for index, one in enumerate(self._remembering)
        ]


def evaluate_with(
    callbacks: Sequence[keras.callbacks.Callback],
    model: keras.Model,
    evaluate: Evaluate,
    prints: bool,
) -> dict[str, float]:
    """Runs an evaluation, with the callbacks' `on_test_*` methods; returns its results.

    Args:
        callbacks: the Keras callbacks.
        model: the model that they see.
        evaluate: a function of batch hooks (or None) that returns the results.
        prints: whether to print the results.
    """
    listed = keras_internals.build_callback_list(list(callbacks), model, 1, 1)
    results = _run_evaluation(listed, model, evaluate)
    if prints:
        print("  ".join(f"{name} {format_metric(v)}" for name, v in results.items()), flush=True)
    return results


def predict_with(
    callbacks: Sequence[keras.callbacks.Callback],
    model: keras.Model,
    predict: Callable[[bool], Iterable[Any]],
    prints: bool,
) -> Any:
    """Runs a prediction, with the callbacks' `on_predict_*` methods; returns the joined outputs.

    Args:
        callbacks: the Keras callbacks.
        model: the model that they see.
        predict: a function that yields the outputs of each batch; its argument says whether the
            devices may compute ahead.
        prints: whether to print the shapes of the outputs.
    """
    listed: Any = keras_internals.build_callback_list(list(callbacks), model, 1, 1)
    watched: Any = model
    watched.stop_predicting = False
    listed.on_predict_begin()
    if watches_batches(callbacks, "predict"):
        outputs = join_outputs(_predict_each(listed, watched, predict(False)))
    else:
        outputs = join_outputs(predict(True))
    listed.on_predict_end()
    if prints:
        print(f"outputs {keras.tree.map_structure(lambda a: a.shape, outputs)}", flush=True)
    return outputs


def _predict_each(listed: Any, model: Any, outputs: Iterable[Any]) -> Iterator[Any]:
    """Yields the outputs of each execution; calls the batch methods before and after each."""
    size = count_execution_steps(model)
    for first, group in group_batches(outputs, size):
        listed.on_predict_batch_begin(first)
        joined = join_outputs(group)
        listed.on_predict_batch_end(first + size - 1, {"outputs": joined})
        yield joined
        if model.stop_predicting:
            return


class _TestHooks:
    """The `BatchHooks` of an evaluation that call the batch methods of callbacks.

    Args:
        listed: Keras's list of callbacks.
        model: the model, whose `stop_evaluating` ends an evaluation.
        read: a function that turns sums into logs.
    """

    def __init__(self, listed: Any, model: Any, read: Callable[[Any], dict[str, float]]):
        self._list, self._model, self._read = listed, model, read
        self.every = count_execution_steps(model)

    def begin(self, batch: int) -> None:
        """Tells the callbacks that an execution begins with this batch."""
        self._list.on_test_batch_begin(batch)

    def end(self, batch: int, sums: Any) -> bool:
        """Tells the callbacks that an execution ended; returns whether they stop the evaluation."""
        self._list.on_test_batch_end(batch + self.every - 1, self._read(sums))
        return self._model.stop_evaluating


def _run_evaluation(listed: Any, model: Any, evaluate: Evaluate) -> dict[str, float]:
    model.stop_evaluating = False
    listed.on_test_begin()
    build_hooks = None
    if watches_batches(listed.callbacks, "test"):
        build_hooks = functools.partial(_TestHooks, listed, model)
    results = evaluate(build_hooks)
    listed.on_test_end(dict(results))
    return results


def _has_user_code(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback runs the user's code, which may add to the logs."""
    own = not type(callback).__module__.startswith("keras.")
    return own or isinstance(callback, keras.callbacks.LambdaCallback)


def _is_remembering(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a resumed run restores the values of a callback.

    An EarlyStopping with restore_best_weights=True starts afresh, because checkpoints do not hold
    its best weights.
    """
    return isinstance(callback, _REMEMBERING) and not getattr(
        callback, "restore_best_weights", False
    )
