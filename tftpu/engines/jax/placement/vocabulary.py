"""Leaves the tables of a vocabulary sharded in a step, and sends the tokens to them instead.

With 262,144 classes and 8,192 tokens a step, the tokens are the smaller part by far. Each device
computes the logits of its rows for the tokens of all devices, and looks up the rows that it holds.
The partition of the vocabulary follows Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; here
along `fsdp`, whose devices hold different examples.
"""

import math
from collections.abc import Sequence

import jax
import keras
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tftpu.config.mesh import DATA, FSDP
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.optim.chunked import Rows
from tftpu.tensors import Tensor

# A table is exchanged twice, as a weight and as a gradient; tokens several times, as embeddings and
# as inputs of the product, with their gradients.
ROWS_PER_TOKEN = 3


class ShardedRows(Rows):
    """Rows that the devices along `fsdp` hold."""

    def __init__(self, mesh: Mesh | AbstractMesh):
        self._mesh = mesh
        self.count = mesh.shape[FSDP]
        self.shares_tokens = mesh.shape[DATA] == 1

    def gather_tokens(self, tokens: Tensor) -> Tensor:
        return self._constrain(tokens, [DATA if self._mesh.shape[DATA] > 1 else None])

    def divide_tokens(self, tokens: Tensor) -> Tensor:
        return self._constrain(tokens, [meshes.list_batch_axes(self._mesh)])

    def shard(self, parts: Tensor) -> Tensor:
        return self._constrain(parts, [FSDP, *[PartitionSpec.UNCONSTRAINED] * (parts.ndim - 1)])

    def _constrain(self, tensor: Tensor, axes: list) -> Tensor:
        sharding = NamedSharding(self._mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(tensor, sharding)


def find_tables(
    layout: Layout, variables: Sequence[keras.Variable], logits: Sequence[int]
) -> list[keras.Variable]:
    """Returns the tables of a vocabulary that stay sharded while a step reads them.

    Args:
        layout: the shardings of the variables.
        variables: the variables of the model.
        logits: the shape of a microbatch's logits, (batch, time, classes), over all devices.
    """
    *tokens, classes = logits
    if classes * layout.mesh.shape[DATA] < ROWS_PER_TOKEN * math.prod(tokens):
        return []

    def is_table(variable: keras.Variable) -> bool:
        shape, spec = tuple(variable.shape), tuple(layout.find_weight_sharding(variable).spec)
        by_row = shape == (classes, *shape[1:]) and spec == (FSDP, None)
        return by_row or (shape == (*shape[:1], classes) and spec == (None, FSDP))

    return [variable for variable in variables if is_table(variable)]
