"""A lowered train step, which an engine passes to preflight.

This module imports no engine, so compiling, pricing and reporting work for every engine alike.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import keras

    from tftpu.config import TrainConfig
    from tftpu.engines.objectives.objective import Objective
    from tftpu.tensors import Nest
    from tftpu.tpu.slices import Slice

ModelFn = Callable[[], "keras.Model"]
# Returns the objectives of a newly built model.
ObjectivesOf = Callable[["keras.Model"], Sequence["Objective"]]

# Name scopes that every engine's step opens around its work outside the model's layers.
STEP_SCOPES = ("loss", "metrics", "optimizer")


class StateBytes(NamedTuple):
    """The bytes of a run's state on one device.

    Attributes:
        weights: the weights of the model, trained or not.
        optimizer: the states of the optimizers.
        averages: moving averages of the weights.
    """

    weights: int
    optimizer: int
    averages: int

    @property
    def total(self) -> int:
        """The bytes of weights, optimizers and averages together."""
        return sum(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweredStep:
    """The train step of one device before compilation, with a description of its model.

    Attributes:
        program: the train step: a serialized HloModuleProto of one replica, or if it is
            `partitioned`, StableHLO text of all devices together, with shardings.
        partitioned: whether the compiler divides the program between the devices.
        forward: HLO text of the forward pass over one microbatch, in inference mode; "": none.
        model_flops: FLOPs that the model needs for a device's shard in a step, independent of the
            compiled program; see `tftpu.engines.origins`.
        arguments: name of each program parameter: "batch", the path of a variable, or "constant".
        layers: class name of every Keras layer, nested ones included, by layer name.
        numbered: whether numbers are appended to layers' names in scopes, as TensorFlow does.
        grouped: names of the layers with grouped convolutions.
        kernels: shape of every trainable weight of two or more dimensions, by variable path.
        precision: dtype policy under which the model was built.
        state_bytes: the bytes of the run's state on a device, which do not depend on the batch.
    """

    program: bytes
    partitioned: bool = False
    forward: str = ""
    model_flops: int = 0
    arguments: list[str]
    layers: dict[str, str] = dataclasses.field(default_factory=dict)
    numbered: bool = True
    grouped: list[str] = dataclasses.field(default_factory=list)
    kernels: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    precision: str
    state_bytes: StateBytes = dataclasses.field(default_factory=lambda: StateBytes(0, 0, 0))

    def find_layer_path(self, op_name: str) -> str:
        """Returns the layers that an op belongs to, as the function `find_layer_path` does."""
        return find_layer_path(op_name, self.layers, self.numbered)

    def find_scope(self, op_name: str) -> str:
        """Returns which of `STEP_SCOPES` an op belongs to, or ""."""
        return find_layer_path(op_name, STEP_SCOPES, self.numbered).split("/")[0]


class BuiltStep(Protocol):
    """A train step that is not lowered yet, with its built model.

    Attributes:
        state_bytes: the bytes of the run's state on a device, which do not depend on the batch.
        has_blocks: whether `train.remat` can recompute blocks of the model.
        model: the model.
    """

    state_bytes: StateBytes
    has_blocks: bool
    model: "keras.Model"

    def count_flops(self) -> int:
        """Returns the FLOPs that the model needs for a device's shard in a step."""
        ...

    def lower(self) -> LoweredStep:
        """Lowers the step.

        Raises:
            UserError: no TPU can run the step.
        """
        ...


class Lowering(Protocol):
    """Lowers train steps for slices of TPUs, on a machine without one."""

    @property
    def remats(self) -> Sequence[str]:
        """The values of `remat` that save memory, from least to most."""
        ...

    def count_data_shards(self, target: "Slice") -> int:
        """Returns the number of shards that a slice divides a global batch into.

        Raises:
            UserError: the engine cannot use these devices.
        """
        ...

    def format_mesh(self, devices: int) -> str:
        """Returns the mesh of this many devices as text; "" if the engine has none."""
        ...

    def list_finer_lowerings(self, target: "Slice") -> "Sequence[Lowering]":
        """Returns lowerings for meshes that divide the model among more devices, fewest first."""
        ...

    def choose_compiler_options(self, target: "Slice") -> dict[str, str]:
        """Returns the options of XLA with which the trainer compiles its step for a slice."""
        ...

    def build_model(self, model_fn: ModelFn, precision: str) -> "keras.Model":
        """Builds a model under a dtype policy, without the initial values of large variables."""
        ...

    def build(
        self,
        model_fn: ModelFn,
        shard_spec: "Nest",
        devices: int,
        precision: str,
        options: "TrainConfig",
        objectives: ObjectivesOf | None = None,
    ) -> BuiltStep:
        """Builds a model and the variables of its train step, without values.

        Args:
            model_fn: a function that returns a newly built and compiled Keras model.
            shard_spec: spec of one shard of the global batch.
            devices: number of devices of the slice.
            precision: dtype policy under which the model is built.
            options: options of the trainer.
            objectives: a function that returns a model's objectives; None: the model is compiled
                with a loss. The lowered step trains all objectives.

        Raises:
            UserError: the model cannot be trained as it is.
        """
        ...


def find_layer_path(op_name: str, layers: Collection[str], numbered: bool = True) -> str:
    """Returns the Keras layers that an op belongs to, outermost first: "block1_attention/qkv".

    Args:
        op_name: name of the op with its name scopes. TensorFlow appends a number to a layer's name,
            as in "head_1/MatMul"; JAX wraps it in transformations, as in
            "jit(train)/transpose(jvp(head))/dot_general".
        layers: names of the model's layers.
        numbered: whether such numbers have to be removed.

    Returns:
        The path, or "" if the op belongs to no layer.
    """
    scopes = [re.sub(r"^(\w+\()+|\)+$", "", scope) for scope in op_name.split("/")]
    # TensorFlow numbers a scope that is opened again; Keras opens it to build and to call a layer.
    if numbered:
        scopes = [re.sub(r"_\d+$", "", scope) for scope in scopes]
    path = [scope for scope in scopes if scope in layers]
    # Operations of the backward pass repeat the path: gradient_tape/resnet50_1/head_1/...
    return "/".join(dict.fromkeys(path))
