"""Lowers a compiled Keras model to the program for a mesh of TPUs, on a machine without a TPU.

The program is traced from the step that the trainer runs. The model is built while JAX traces, so
its variables have shapes but no values, and need no memory.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import AbstractMesh

from tftpu.blocks.running import has_blocks
from tftpu.config import TrainConfig
from tftpu.config.mesh import (
    check_between_slices,
    count_batch_shards,
    list_finer_meshes,
    mesh_sizes,
    mesh_text,
)
from tftpu.engines import keras_internals
from tftpu.engines.data.conversion import replace_examples
from tftpu.engines.jax import cluster
from tftpu.engines.jax.state import JaxState, StateValues
from tftpu.engines.jax.step.train_step import TrainStep
from tftpu.engines.jax.tracing import tracing_for
from tftpu.engines.lowered import LoweredStep, ModelFn, ObjectivesOf, StateBytes
from tftpu.engines.objectives.losses import count_examples
from tftpu.errors import UserError
from tftpu.optim.policy import building_under
from tftpu.tensors import Nest
from tftpu.tpu.compiler_options import AUTO, choose_compiler_options
from tftpu.tpu.slices import Slice


class JaxLowering:
    """See `tftpu.engines.lowered.Lowering`: one program for a mesh of all devices.

    Args:
        mesh: see `tftpu.connect`.
        setting: the XLA options, as for `tftpu.connect`.
    """

    remats = ("products", "block", "offload")

    def __init__(self, mesh: str | None, setting: str = AUTO):
        self._mesh = mesh
        self._setting = setting
        cluster.use_cpu()

    def count_data_shards(self, target: Slice) -> int:
        """Returns the number of shards that the mesh of a slice divides a batch into."""
        sizes = mesh_sizes(self._mesh, target.replicas)
        check_between_slices(sizes, target.slices)
        return count_batch_shards(sizes)

    def format_mesh(self, devices: int) -> str:
        """Returns the text of the mesh for a number of devices, such as "data:4,tensor:2"."""
        return mesh_text(mesh_sizes(self._mesh, devices))

    def list_finer_lowerings(self, target: Slice) -> list["JaxLowering"]:
        """Returns lowerings for meshes with more devices along `fsdp` and fewer along `data`."""
        finer = list_finer_meshes(mesh_sizes(self._mesh, target.replicas), target.slices)
        return [JaxLowering(mesh_text(sizes), self._setting) for sizes in finer]

    def choose_compiler_options(self, target: Slice) -> dict[str, str]:
        """Returns the options of XLA with which the trainer compiles its step for a slice."""
        return choose_compiler_options(self._setting, target.generation)

    def build_model(self, model_fn: ModelFn, precision: str) -> keras.Model:
        """Builds a model for one device, whose variables have no values."""
        sizes = mesh_sizes(None, 1)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        made: list[keras.Model] = []
        with _tracing_under(precision), keras_internals.fresh_names(), tracing_for("tpu", mesh):
            jax.eval_shape(lambda: made.append(model_fn()))
        return made[0]

    def build(
        self,
        model_fn: ModelFn,
        shard_spec: Nest,
        devices: int,
        precision: str,
        options: TrainConfig,
        objectives: ObjectivesOf | None = None,
    ) -> "JaxBuiltStep":
        """Builds the train step, one program for all devices."""
        mesh = self._build_abstract_mesh(devices)
        with _tracing_under(precision):
            state, step, shapes = _trace_step(model_fn, shard_spec, mesh, options, objectives)
        return JaxBuiltStep(state, step, shapes, precision)

    def _build_abstract_mesh(self, devices: int) -> AbstractMesh:
        """Returns an abstract mesh of a number of devices, without any real device.

        Raises:
            UserError: the mesh does not use every device exactly once.
        """
        sizes = mesh_sizes(self._mesh, devices)
        return AbstractMesh(tuple(sizes.values()), tuple(sizes))


class JaxBuiltStep:
    """See `tftpu.engines.lowered.BuiltStep`.

    Args:
        state: the variables, on an abstract mesh.
        step: the train step.
        shapes: the shapes and dtypes of the variables' values, as `jax.ShapeDtypeStruct`s.
        precision: dtype policy under which the model was built.
    """

    def __init__(self, state: JaxState, step: TrainStep, shapes: StateValues, precision: str):
        self._state, self._step, self._shapes = state, step, shapes
        self._precision = precision
        self.state_bytes = _count_state_bytes(shapes, state.shardings)
        self.has_blocks = has_blocks(state.model)
        self.model = state.model

    def count_flops(self) -> int:
        """Returns the model FLOPs of a step, divided by the number of devices."""
        with _tracing_under(self._precision):
            return self._step.model_flops // self._state.layout.mesh.size

    def lower(self) -> LoweredStep:
        """Lowers the train step, one program for all devices."""
        with _tracing_under(self._precision):
            program, arguments = _lower_train_step(self._state, self._step, self._shapes)
            forward = _lower_forward(self._step, self._shapes)
        model = self.model
        flat = keras_internals.list_layers(model)
        return LoweredStep(
            program=program,
            partitioned=True,
            forward=forward,
            model_flops=self.count_flops(),
            arguments=arguments,
            layers={layer.name: type(layer).__name__ for layer in flat},
            numbered=False,
            kernels={v.path: tuple(v.shape) for v in model.trainable_variables if len(v.shape) > 1},
            precision=self._precision,
            state_bytes=self.state_bytes,
        )


@contextlib.contextmanager
def _naming_no_lines() -> Iterator[None]:
    """Omits source locations from the programs that are lowered inside the `with` block.

    With line numbers, an edit that moves the lines of a model would invalidate cached programs.
    The names of the layers stay in the program.
    """
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def _tracing_under(precision: str) -> Iterator[None]:
    """Sets a dtype policy; raises `UserError` for a traced loop that JAX cannot differentiate."""
    try:
        with building_under(precision):
            yield
    except ValueError as error:
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        raise UserError(
            "A layer has a loop that JAX cannot differentiate, because its number of "
            "iterations is unknown: use keras.ops.scan, or a fixed number of iterations. JAX "
            f"reports: {str(error)[:200]}"
        ) from error


def _trace_step(
    model_fn: ModelFn,
    shard_spec: Nest,
    mesh: AbstractMesh,
    options: TrainConfig,
    objectives: ObjectivesOf | None,
) -> tuple[JaxState, TrainStep, StateValues]:
    """Returns the variables and the step of a model, and the shapes of the variables."""
    made: list[tuple[JaxState, TrainStep]] = []
    examples = count_batch_shards(mesh.shape) * count_examples(shard_spec)

    def build() -> StateValues:
        with keras_internals.fresh_names(), tracing_for("tpu", mesh):
            model = model_fn()
            found = objectives(model) if objectives is not None else ()
            whole = replace_examples(shard_spec, examples)
            state = JaxState(mesh, model, whole, options, found)
            made.append((state, TrainStep(state, shard_spec)))
        return state.read_values()

    shapes: Any = jax.eval_shape(build)
    [(state, step)] = made
    return state, step, shapes


def _lower_train_step(
    state: JaxState, step: TrainStep, shapes: StateValues
) -> tuple[bytes, list[str]]:
    """Returns the train step as StableHLO text, and the names of its parameters."""
    layout = state.layout
    values = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        state.shardings,
    )
    batch = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(
            s.shape, s.dtype, sharding=layout.build_batch_sharding(len(s.shape))
        ),
        step.microbatching.batch,
    )
    sums = jax.ShapeDtypeStruct((step.sums.size,), jnp.float32, sharding=layout.whole)
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.whole)
    due = tuple(range(len(state.groups)))

    def train(values: StateValues, sums: Any, number: Any, batch: Nest) -> tuple[StateValues, Any]:
        with tracing_for("tpu", layout.mesh):
            return step.train(values, sums, number, batch, due)

    jitted = jax.jit(
        train,
        donate_argnums=(0, 1),
        out_shardings=(state.shardings, layout.whole),
        keep_unused=True,
    )
    traced = jitted.trace(values, sums, number, batch)
    with _naming_no_lines():
        lowered = traced.lower(lowering_platforms=("tpu",))
    module: Any = lowered.compiler_ir("stablehlo")
    text: str = module.operation.get_asm(enable_debug_info=True)
    data = ["batch"] * len(jax.tree.leaves(batch))
    names = [*_list_names(state), "(sums)", "(step)", *data]
    # While JAX traces, it computes everything that depends on no argument. Large results become
    # the first parameters of the program.
    functions = {str(f.sym_name.value): f for f in module.body.operations}
    constants = len(functions["main"].type.inputs) - len(names)
    return text.encode(), ["(constant)"] * constants + names


def _count_state_bytes(shapes: StateValues, shardings: StateValues) -> StateBytes:
    """Returns the bytes that the sharded values take on one device."""

    def count_bytes(arrays: Any, places: Any) -> int:
        parts = jax.tree.map(lambda s, place: place.shard_shape(s.shape), arrays, places)
        found = zip(jax.tree.leaves(arrays), jax.tree.leaves(parts, is_leaf=_is_shape))
        return sum(math.prod(part) * array.dtype.itemsize for array, part in found)

    weights = count_bytes(shapes.trainable, shardings.trainable)
    others = count_bytes(shapes.untrained, shardings.untrained)
    optimizers = count_bytes(shapes.optimizers, shardings.optimizers)
    return StateBytes(
        weights + others, optimizers, count_bytes(shapes.averages, shardings.averages)
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple)


def _list_names(state: JaxState) -> list[str]:
    """Returns the names of the variables in the order of the leaves of `StateValues`."""
    trainable = state.model.trainable_variables
    optimizers = [v.path for group in state.groups for v in group.optimizer.variables]
    scales = jax.tree.leaves(state.shardings.scales)
    return [
        *(v.path for v in trainable),
        *(v.path for v in state.untrained),
        *optimizers,
        *(["(loss scale)"] * len(scales)),
        *(f"ema/{v.path}" for v in trainable if state.averages),
    ]


def _lower_forward(step: TrainStep, shapes: StateValues) -> str:
    """Returns the HLO text of the forward pass over one microbatch of the whole mesh.

    Lowers for this machine, because the matrix products inside TPU kernels would not be visible.
    """
    lowered = jax.jit(step.forward).lower(shapes, step.microbatching.microbatch)
    computation: Any = lowered.compiler_ir("hlo")
    return computation.get_hlo_module().to_string()
