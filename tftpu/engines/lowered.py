"""A lowered train step: what an engine hands to preflight.

This module imports no engine, so compiling, pricing and reporting work for every engine alike.
"""

import dataclasses
import re
from collections.abc import Collection

# Name scopes that the step of every engine opens for its work outside the model's layers.
STEP_SCOPES = ("loss", "metrics", "optimizer")


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """The train step of one replica before compilation, with a description of its model.

    Attributes:
        hlo: serialized HloModuleProto of the train step.
        forward: HLO text of the forward pass over one microbatch, in inference mode. In training
            mode it would include the batch statistics, which do not count as model FLOPs.
        gradient_accumulation_steps: microbatches per step.
        arguments: name of each program parameter: "batch", or the path of a variable.
        layers: class name of every Keras layer, nested ones included, by layer name.
        grouped: names of the layers with grouped convolutions.
        kernels: shape of every weight with two or more dimensions, by variable path.
        precision: dtype policy under which the model was built.
    """

    hlo: bytes
    forward: str
    gradient_accumulation_steps: int
    arguments: list[str]
    layers: dict[str, str]
    grouped: list[str]
    kernels: dict[str, tuple[int, ...]]
    precision: str


def layer_path(op_name: str, layers: Collection[str]) -> str:
    """Returns the Keras layers that an op belongs to, outermost first: "block1_attention/qkv".

    Args:
        op_name: name of the op with its name scopes; a layer's scope is its name followed by a
            number, as in "head_1/MatMul".
        layers: names of the model's layers.

    Returns:
        The path, or "" if the op belongs to no layer.
    """
    # Keras opens each scope twice, to build and to call the layer, so there is always a number.
    scopes = [re.sub(r"_\d+$", "", scope) for scope in op_name.split("/")]
    path = [scope for scope in scopes if scope in layers]
    # Ops of the backward pass repeat the path: gradient_tape/resnet50_1/head_1/...
    return "/".join(dict.fromkeys(path))
