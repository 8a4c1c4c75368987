"""A model's own steps: `train_step`, `test_step` and `predict_step`, each for a whole batch.

An engine's step divides a batch among devices, and adds up losses and metrics over the shards.
Some models do not allow that: those with their own `train_step`, with metrics that they update
themselves, or with losses that are not means over examples. Their own steps run instead, as under
Keras's `fit`: on one device, in one program over all devices of a mesh, or on each of several
replicas with the whole batch.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tftpu.config import TrainConfig
from tftpu.engines import keras_internals
from tftpu.engines.data import conversion
from tftpu.engines.data.batches import data_errors, warn_if_endless
from tftpu.engines.data.outputs import group_batches
from tftpu.engines.data.streams import Stream
from tftpu.engines.engine import BatchHooks, LoopResult
from tftpu.engines.objectives.losses import FIELDS
from tftpu.errors import OwnStepsNeeded, UserError
from tftpu.tensors import Nest, ops


class Logs(dict[str, float]):
    """The logs of a model's own step, which are means since the beginning of an epoch.

    Adding the logs of two device loops therefore returns the later logs.
    """

    def __add__(self, later: "Logs") -> "Logs":
        return later

    def tolist(self) -> dict[str, float]:
        """Returns the logs for JSON."""
        return dict(self)


class LogsLayout:
    """The `TrainSumsLayout` of a model's own steps, which return logs instead of sums.

    Attributes:
        names: empty, because nothing is summed up.
        result_names: None, because the names of the logs are unknown before the first step.
    """

    names: Sequence[str] = ()
    result_names: Sequence[str] | None = None

    def read(self, sums: Logs) -> dict[str, float]:
        """Returns the logs."""
        return dict(sums)

    def scale(self, sums: Logs, weight: float) -> Logs:
        """Returns the logs unchanged, because Keras already weights batches by their size."""
        return sums

    def read_gradients(self, sums: Logs) -> dict[str, float]:
        """Returns {}, because a model's own step does not return its gradients."""
        return {}

    def compute_loss(self, sums: Logs) -> float:
        """Returns the loss, or NaN if the logs have none."""
        return sums.get("loss", float("nan"))


def count_execution_steps(model: Any) -> int:
    """Returns a model's `steps_per_execution`: the number of batches between calls of callbacks."""
    given = model.steps_per_execution
    return given if isinstance(given, int) else 1  # "auto" counts as 1


def check_options(options: TrainConfig, reason: OwnStepsNeeded) -> None:
    """Raises `UserError` for options that a model's own steps do not support.

    Args:
        options: the options of training.
        reason: the reason why the model's own steps run.
    """
    instead = {
        "gradient_accumulation_steps": "pass gradient_accumulation_steps=N to the optimizer",
        "ema_momentum": "pass use_ema=True and ema_momentum=… to the optimizer",
        "global_clipnorm": "pass global_clipnorm=… to the optimizer",
        "remat": "build the model in a keras.RematScope",
        "scan": "leave it at 'none'",
    }
    default = TrainConfig()
    for name, advice in instead.items():
        value = getattr(options, name)
        if value != getattr(default, name):
            raise UserError(
                f"{reason} So the model's own steps run, which do not support {name}={value}: "
                f"{advice}."
            )


def list_own_variables(model: keras.Model) -> dict[str, list[Any]]:
    """Returns the variables of a model, its metrics and optimizers, by checkpoint group."""
    seeds = keras_internals.list_seed_states(model)
    groups = {
        "seeds": seeds,
        "metrics": list(model.metrics_variables),
        "optimizer": [v for one in list_held(model, keras.Optimizer) for v in one.variables],
        "model": list(model.variables),
    }
    listed: set[int] = set()
    for group, variables in groups.items():
        groups[group] = [v for v in variables if id(v) not in listed]
        listed.update(map(id, variables))
    return groups


def list_held(model: keras.Model, kind: type) -> list[Any]:
    """Returns the objects of a class in a model's attributes, also in lists and dictionaries."""
    found: dict[int, Any] = {}

    def visit(value: Any) -> None:
        if isinstance(value, kind):
            found[id(value)] = value
        elif isinstance(value, list | tuple | dict):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)

    visit(dict(vars(model)))
    return list(found.values())


class OwnStepsExecutor:
    """The part of `Executor` that both engines share for a model's own steps.

    Args:
        model: the compiled and built model.

    Attributes:
        model: the argument.
        train_sums, eval_sums: the layouts of the logs of training and of an evaluation.
        evaluation_compiled: whether an evaluation has run.
    """

    def __init__(self, model: keras.Model):
        self.model: Any = model
        self.train_sums = self.eval_sums = LogsLayout()
        self.evaluation_compiled = False

    @property
    def optimizer_name(self) -> str:
        """The class name of the optimizer."""
        return type(self._optimizer).__name__

    @property
    def learning_rate(self) -> float:
        """The learning rate of the (first) optimizer at this step; NaN if there is none."""
        if self._optimizer is None:
            return float("nan")
        # Keras's MultiOptimizer has no rate of its own.
        optimizer = getattr(self._optimizer, "optimizers", [self._optimizer])[0]
        return float(ops.convert_to_numpy(optimizer.learning_rate))

    @property
    def _optimizer(self) -> Any:
        optimizer: Any = getattr(self.model, "optimizer", None)
        return getattr(optimizer, "inner_optimizer", optimizer)

    def training(self, shard_spec: Nest, examples: int | None = None) -> "OwnTrainLoop":
        """Returns the train loop, for batches of any shape."""
        return OwnTrainLoop(self)

    def train(self, batches: Iterator[Nest], steps: int) -> LoopResult:
        """Runs training steps on whole batches, fewer if there are fewer batches."""
        raise NotImplementedError

    def bare(self, shard_spec: Nest, batch: Any) -> Callable[[int], None]:
        """Returns a function that runs a number of training steps on one batch."""
        return lambda steps: self.train(itertools.repeat(batch), steps) and None

    def evaluate(
        self,
        dataset: Any,
        compiling: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        hooks: BatchHooks | None = None,
    ) -> Logs:
        """Returns the logs of an evaluation."""
        self.model.reset_metrics()
        logs: Any = {}
        with data_errors():
            for first, group in self.iterate_groups(dataset):
                if hooks is not None:
                    hooks.begin(first)
                logs = self._test_group(group)
                if hooks is not None and hooks.end(first, to_logs(logs)):
                    break
        self.evaluation_compiled = True
        return self.finish_epoch(to_logs(logs))

    def _test_group(self, group: list[Nest]) -> Any:
        """Runs the test steps of one execution; returns the logs after them."""
        raise NotImplementedError

    def iterate_groups(self, dataset: Any) -> Iterator[tuple[int, list[Nest]]]:
        """Yields, for each execution, the number of its first batch and a list of its batches."""
        if isinstance(dataset, Stream):
            return group_batches(dataset.iterate(), count_execution_steps(self.model))
        batches = conversion.build_whole_evaluation(dataset)
        items = warn_if_endless(self._iterate(batches), int(batches.cardinality()), dataset=dataset)
        return group_batches(items, count_execution_steps(self.model))

    def _iterate(self, batches: Any) -> Iterator[Nest]:
        raise NotImplementedError

    def begin_epoch(self) -> None:
        """Resets the running means of the logs."""
        self.model.reset_metrics()

    def finish_epoch(self, sums: Logs) -> Logs:
        """Returns the logs of a whole epoch: the metrics' results, if they have the logs' names."""
        return to_logs(keras_internals.select_metric_results(self.model, sums))

    def finish_training(self) -> None:
        """Overwrites the weights with their averages, if the optimizer has use_ema=True."""
        if self._optimizer is not None:
            self._optimizer.finalize_variable_values(self.model.trainable_variables)

    def warn_of_mixing(self, dataset: Any, class_weight: dict[int, float] | None = None) -> None:
        """Does nothing, because no batch is divided."""

    def check_evaluation(self, batch_spec: Any, dataset: Any) -> None:
        """Does nothing, because Keras finds mistakes in the first step."""

    def averaged_weights(self) -> dict[str, Any]:
        """Returns {}, because only the optimizer keeps averages."""
        return {}


class OwnTrainLoop:
    """The `TrainLoop` of a model's own steps.

    Args:
        executor: the executor, which runs the steps.

    Attributes:
        model_flops: None, because a model's own step may compute anything.
    """

    model_flops: int | None = None

    def __init__(self, executor: OwnStepsExecutor):
        self._executor = executor
        self._compiled = False

    def compiled(self, batches: Iterator[Any]) -> bool:
        """Returns whether the step is compiled, at least for complete batches."""
        return self._compiled

    def run(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps."""
        result = self._executor.train(batches, steps)
        self._compiled = True
        return result

    def run_each(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps on batches in host memory."""
        return self.run(batches, steps)

    def diverged(self, sums: Logs) -> bool:
        """Returns whether the loss in the logs is no longer finite."""
        return not np.isfinite(sums.get("loss", 0.0))


def to_logs(given: Any) -> Logs:
    """Converts the dictionary that a model's own step returned to logs of floats."""
    if not isinstance(given, dict):
        raise UserError(
            f"The model's own step returns a {type(given).__name__}: it must return a dictionary "
            "of logs, such as {'loss': loss}."
        )
    found = Logs()
    for name, value in given.items():
        if name in FIELDS:
            raise UserError(
                f"The model's own step returns a log named {name!r}, but tftpu itself logs a value "
                "of that name: give yours another name."
            )
        # Keras's compiled metrics are one metric whose result is a dictionary.
        found |= to_logs(value) if isinstance(value, dict) else {name: _to_number(name, value)}
    return found


def _to_number(name: str, value: Any) -> float:
    array = ops.convert_to_numpy(value)
    if array.size != 1:
        raise UserError(
            f"The log {name!r} of the model's own step must be a scalar, not {array.size} values."
        )
    return float(array.reshape(()))
