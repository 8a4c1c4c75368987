"""Keeps the tables of a vocabulary sharded in a step, and gathers the activations instead.

With 262,144 classes and 8,192 tokens per step, activations are far smaller than tables. Each device
computes the logits of its rows of the table for all devices' tokens, and looks up embeddings there.
The partition of the vocabulary follows Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, but
along `fsdp`, whose devices have different examples.
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

# The ratio of rows to tokens from which sending tokens is cheaper than sending the table. Devices
# exchange a table twice, as weight and gradient, but tokens more often: embeddings, inputs of the
# logits, and gradients.
ROWS_PER_TOKEN = 3


class ShardedRows(Rows):
    """The rows of a table that is sharded along `fsdp`; see `tftpu.optim.chunked.Rows`."""

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
    """Returns the tables of a vocabulary (embeddings, logits) to keep sharded during a step.

    Args:
        layout: the shardings of the variables.
        variables: the variables of the model.
        logits: the shape of a microbatch's logits, (batch, time, classes), over all devices. With
            too many tokens for the number of classes, no table stays sharded.
    """
    *tokens, classes = logits
    if classes * layout.mesh.shape[DATA] < ROWS_PER_TOKEN * math.prod(tokens):
        return []

    def is_table(variable: keras.Variable) -> bool:
        shape, spec = tuple(variable.shape), tuple(layout.find_weight_sharding(variable).spec)
        by_row = shape == (classes, *shape[1:]) and spec == (FSDP, None)
        return by_row or (shape == (*shape[:1], classes) and spec == (None, FSDP))

    return [variable for variable in variables if is_table(variable)]
