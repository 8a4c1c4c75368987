"""The TensorFlow engine: data parallelism with `tf.distribute`, one replica per device."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tftpu import sharding
from tftpu.config import TrainConfig
from tftpu.engines import checks
from tftpu.engines.base import BaseEngine
from tftpu.engines.data.gate import Gate
from tftpu.engines.data.tuning import limit_tuning
from tftpu.engines.ending import end_iterators_at_exit
from tftpu.engines.engine import Epoch
from tftpu.engines.objectives.objective import Objective
from tftpu.engines.tensorflow import feed
from tftpu.engines.tensorflow.executor import TensorFlowExecutor
from tftpu.engines.tensorflow.hosts import StrategyHosts
from tftpu.engines.tensorflow.own_steps import TensorFlowOwnSteps
from tftpu.engines.tensorflow.tracer import TensorFlowTracer
from tftpu.errors import OwnStepsNeeded, UserError, counted
from tftpu.tensors import Nest
from tftpu.tpu import hardware

# Errors that collectives raise on the remaining hosts if a host is lost.
_LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)


class TensorFlowEngine(BaseEngine):
    """The engine that runs on a `tf.distribute` strategy; see `tftpu.engines.engine.Engine`.

    Args:
        strategy: a TPUStrategy, MirroredStrategy or MultiWorkerMirroredStrategy, or the default
            strategy for a single device.

    Attributes:
        strategy: the strategy.
        distributes: whether models must be built in the scope of the strategy.
        compiler_options: always empty, because TensorFlow's runtime compiles with its own options.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        end_iterators_at_exit()
        self.strategy = strategy
        self.data_shards: int = strategy.num_replicas_in_sync
        self.description = counted(self.data_shards, "replica")
        self.hosts = StrategyHosts(strategy)
        self.tracer = TensorFlowTracer()
        on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self.compiler_options: dict[str, str] = {}
        self.distributes: bool = on_tpu or self.data_shards > 1
        self._platform = "tpu" if on_tpu else None
        self.hardware = hardware.find_hardware(self.data_shards, on_tpu)

    def lost_host(self, error: BaseException) -> bool:
        """Returns whether an exception means that another host is lost."""
        return self.hosts.count > 1 and isinstance(error, _LOST)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Enters the strategy's scope, in which models are built."""
        with sharding.compiling_for(self._platform), self.strategy.scope():
            yield

    def refuse(self, model: keras.Model, objectives: Sequence[Objective] = ()) -> None:
        """Raises `UserError` for a model that this engine cannot train."""
        try:
            checks.refuse_model(model, objectives, labelled=False)
        except OwnStepsNeeded as reason:
            self._check_own_steps(model, reason)
        created = self.strategy.extended.variable_created_in_scope
        owners: list[tuple[str, Any]] = [("model", model)]
        own = [getattr(model, "optimizer", None)]
        for optimizer in [one.optimizer for one in objectives] or own:
            if optimizer is not None and not isinstance(
                optimizer, str
            ):  # an optimizer given by name is created later, inside the scope
                owners.append(("optimizer", optimizer))
        for what, owner in owners:
            if not all(created(variable.value) for variable in owner.variables):
                raise UserError(format_scope_error(f"The {what} {owner.name!r}"))

    def batches(
        self,
        dataset: Any,
        position: int,
        class_weight: dict[int, float] | None = None,
        epoch: Epoch | None = None,
        gate: Gate | None = None,
    ) -> Iterator[Any]:
        """Returns an endless iterator over global batches, divided among the replicas."""
        return feed.iterate_training_batches(
            dataset, position, self.strategy, class_weight, epoch, gate
        )

    def _iterate(self, batches: tf.data.Dataset) -> Iterator[Any]:
        return iter(limit_tuning(batches.prefetch(tf.data.AUTOTUNE)))

    def prepare_own_steps(
        self, model: keras.Model, batch_spec: Nest, reason: UserError, labelled: bool = True
    ) -> TensorFlowOwnSteps:
        """Prepares a model to run its own steps, with the whole batch on each device."""
        self._check_own_steps(model, reason)
        if self.distributes:
            warnings.warn(
                f"{reason} So each of the {self.data_shards} devices computes the whole batch, and "
                "training is no faster than on one device.",
                stacklevel=2,
            )
        with self.scope():
            return TensorFlowOwnSteps(self.strategy, model, batch_spec, labelled)

    def _check_own_steps(self, model: keras.Model, reason: UserError) -> None:
        """Raises `UserError` unless the model's own steps can run on these devices."""
        on_tpu = self._platform == "tpu"
        if on_tpu and model.run_eagerly:
            raise UserError(
                f"{reason} A TPU runs only compiled programs: compile the model without "
                "run_eagerly."
            )
        why = checks.explain_one_device(model)
        if not why and (on_tpu or self.hosts.count > 1):
            why = "each device would need the whole batch"
        if self.distributes and why:
            raise UserError(
                f"{reason} On the TensorFlow engine, such a model trains on one device only, "
                f"because {why}. To train on several devices, use the JAX engine (engine='jax'), "
                "whose steps see the whole batch; or pass the Trainer a loss_fn(model, batch, "
                "training) or objectives=[...]."
            )

    def prepare(
        self,
        model: keras.Model,
        options: TrainConfig,
        batch_spec: Nest,
        objectives: Sequence[Objective] = (),
        labelled: bool = True,
    ) -> TensorFlowExecutor:
        """Prepares a model to train, evaluate and predict on the strategy's devices."""
        return TensorFlowExecutor(
            self.strategy, self._platform, model, options, batch_spec, objectives, labelled
        )


def format_scope_error(what: str) -> str:
    """Returns the error message for an object that was built outside the engine's scope."""
    return (
        f"{what} was created outside the scope of the engine that tftpu.connect() returned, so it "
        "is not on the engine's devices. Build and compile the model inside: with engine.scope(): "
        "model = ...; model.compile(...)"
    )
