"""The JAX engine: one program over a mesh of devices, partitioned by XLA (GSPMD)."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
from jax.sharding import Mesh

from tftpu.config import TrainConfig
from tftpu.engines import checks
from tftpu.engines.base import BaseEngine
from tftpu.engines.data import conversion
from tftpu.engines.data.gate import Gate
from tftpu.engines.ending import end_iterators_at_exit
from tftpu.engines.engine import Epoch, Hosts
from tftpu.engines.jax import feed, internals
from tftpu.engines.jax.executor import JaxExecutor
from tftpu.engines.jax.own_steps import JaxOwnSteps
from tftpu.engines.jax.placement import creation, initial, placing
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.processes.hosts import JaxHosts, OneHost
from tftpu.engines.jax.tracer import JaxTracer
from tftpu.engines.jax.tracing import building_for
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.objectives.objective import Objective
from tftpu.errors import OwnStepsNeeded, UserError, counted
from tftpu.tensors import Nest
from tftpu.tpu import hardware
from tftpu.tpu.compiler_options import AUTO, choose_compiler_options

# Beginnings of the messages of JAX errors that are not caused by a lost host.
_OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")


class JaxEngine(BaseEngine):
    """See `tftpu.engines.engine.Engine`.

    Args:
        mesh: the devices, with the axes of `tftpu.engines.jax.placement.mesh`.
        setting: the XLA options for the train step, as for `tftpu.connect`.
        hosts: the processes that own these devices; None if this process owns all of them.

    Attributes:
        mesh: the devices.
        hosts: the processes that train together.
        compiler_options: XLA's options for the train step, by name.
    """

    def __init__(self, mesh: Mesh, setting: str = AUTO, hosts: JaxHosts | None = None):
        end_iterators_at_exit()
        internals.place_values_by(placing.place_value)
        self.mesh = mesh
        self.data_shards: int = meshes.count_batch_shards(mesh)
        self.hosts: Hosts = hosts or OneHost()
        self._part = meshes.find_batch_shard(mesh, self.hosts.index)
        self.tracer = JaxTracer()
        devices = mesh.devices.flatten()
        self._platform: str = devices[0].platform
        axes = ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items() if size > 1)
        of_hosts = f" of {self.hosts.count} hosts" if self.hosts.count > 1 else ""
        self.description = ", ".join(
            filter(None, [f"{counted(len(devices), 'device')}{of_hosts}", "JAX engine", axes])
        )
        self.hardware = hardware.find_hardware(len(devices), self._platform == "tpu")
        self.compiler_options = choose_compiler_options(setting, self.hardware.generation)

    def lost_host(self, error: BaseException) -> bool:
        """Returns whether an exception means that another host is lost."""
        if self.hosts.count == 1 or not isinstance(error, jax.errors.JaxRuntimeError):
            return False
        return not str(error).startswith(_OWN_FAULTS)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Enters the context in which models are built."""
        with (
            building_for(self._platform, self.mesh),
            creation.sharded_variables(self.mesh),
            initial.as_tensorflow(),
        ):
            yield

    def refuse(self, model: keras.Model, objectives: Sequence[Objective] = ()) -> None:
        """Raises `UserError` for a model that this engine cannot train."""
        try:
            checks.refuse_model(model, objectives, labelled=False)
        except OwnStepsNeeded as reason:
            self._check_own_steps(model, reason)

    def batches(
        self,
        dataset: Any,
        position: int,
        class_weight: dict[int, float] | None = None,
        epoch: Epoch | None = None,
        gate: Gate | None = None,
    ) -> Iterator[Any]:
        """Returns an endless iterator over global batches."""
        return feed.iterate_training_batches(
            dataset, position, self._part, class_weight, epoch, gate
        )

    def _iterate(self, batches: Any) -> Iterator[Any]:
        return feed.iterate_arrays(batches)

    def building_spec(self, shard_spec: Nest) -> Nest:
        """Returns the spec of the model's input in a step, which is the whole global batch."""
        return conversion.replace_examples(
            shard_spec, self.data_shards * count_examples(shard_spec)
        )

    def prepare_own_steps(
        self, model: keras.Model, batch_spec: Nest, reason: UserError, labelled: bool = True
    ) -> JaxOwnSteps:
        """Prepares a model with its own `train_step`, which runs as one program over the mesh."""
        self._check_own_steps(model, reason)
        with self.scope():
            return JaxOwnSteps(
                self.mesh,
                self._part,
                self._platform,
                model,
                batch_spec,
                labelled,
                self.compiler_options,
            )

    def _check_own_steps(self, model: keras.Model, reason: UserError) -> None:
        """Raises `UserError` unless the model's own steps can run on these devices."""
        if model.run_eagerly and (self._platform == "tpu" or self.hosts.count > 1):
            raise UserError(
                f"{reason} Eager steps work only on the CPUs or GPUs of one machine: a TPU and "
                "several hosts run only compiled programs. Compile the model without run_eagerly."
            )

    def prepare(
        self,
        model: keras.Model,
        options: TrainConfig,
        batch_spec: Nest,
        objectives: Sequence[Objective] = (),
        labelled: bool = True,
    ) -> JaxExecutor:
        """Prepares a model to train, evaluate and predict on the mesh."""
        with self.scope():  # layers that the executor builds belong on the devices, too
            return JaxExecutor(
                self.mesh,
                self._part,
                self._platform,
                model,
                options,
                batch_spec,
                objectives,
                labelled,
                self.compiler_options,
            )
