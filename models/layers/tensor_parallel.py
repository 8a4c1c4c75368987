"""The dimensions of a transformer that a mesh's `tensor` axis shards.

As in Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), the first matrix of
attention and of the MLP is sharded by its outputs and the second by its inputs, which takes one
exchange for each pair; embedding and head are sharded by the vocabulary. Between the pairs, the
activations are sharded by tokens (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
"""

import functools
import operator
import re
from collections.abc import Mapping

import keras
from keras import layers

from tftpu import sharding
from tftpu.models.layers.dense import Dense
from tftpu.sharding import EXAMPLES, HEADS, TOKENS
from tftpu.tensors import Tensor, ops

Rule = tuple[str, tuple[str | None, ...]]
_AXIS = "tensor"
_IF_IT_DIVIDES = "tensor?"

TRANSFORMER: tuple[Rule, ...] = (
    (r"_attention/(query|key|value|qkv)/kernel$", (None, _AXIS)),
    (r"_attention/(query|key|value|qkv)/bias$", (_AXIS,)),
    (r"_attention/out/kernel$", (_AXIS, None)),
    (r"_(gate|expand)/kernel$", (None, _AXIS)),
    (r"_(gate|expand)/bias$", (_AXIS,)),
    (r"_contract/kernel$", (_AXIS, None)),
)


# Many vocabularies have a size that the axis does not divide. They are not sharded.
VOCABULARY: tuple[Rule, ...] = (
    (r"^tokens_embed/embeddings$", (_IF_IT_DIVIDES, None)),
    (r"^head/kernel$", (None, _IF_IT_DIVIDES)),
    (r"^head/bias$", (_IF_IT_DIVIDES,)),
)


def select_rules(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Rule, ...]:
    """Returns the sharding rules that apply to a model's variables; none without attention.

    Args:
        shapes: the shapes of the variables, by path.
    """
    if not any("_attention/" in path for path in shapes):
        return ()
    rules = TRANSFORMER
    tokens = shapes.get("tokens_embed/embeddings")
    if tokens:
        of_tokens = (r for r in VOCABULARY if _list_sizes(r, shapes) <= {tokens[0]})
        rules += tuple(of_tokens)
    return tuple(rule for rule in rules if any(re.search(rule[0], path) for path in shapes))


def _list_sizes(rule: Rule, shapes: Mapping[str, tuple[int, ...]]) -> set[int]:
    """Returns the sizes of the dimensions that a rule shards, over all variables it matches."""
    pattern, axes = rule
    place = axes.index(_IF_IT_DIVIDES)
    return {shape[place] for path, shape in shapes.items() if re.search(pattern, path)}


def project_heads(layer: Dense, x: Tensor, heads: int, equation: str) -> list[Tensor]:
    """Returns queries, keys and values without their biases, each by a separate product.

    If the mesh shards heads, their matrices are sharded by heads.

    Args:
        layer: a layer with one matrix for all three, (width, 3 * width).
        x: (batch, time, width).
        heads: number of heads, a divisor of the width.
        equation: the equation of the products of x with three kernels, each (width, heads,
            head_dim).
    """
    terms = [
        [ops.einsum(equation, given, kernel) for kernel in _split_by_heads(matrix, heads)]
        for given, matrix in layer.compute_factors(x)
    ]
    return [functools.reduce(operator.add, parts) for parts in zip(*terms)]


def split_biases(bias: Tensor, heads: int) -> list[Tensor]:
    """Returns the biases of queries, keys and values, (heads, head_dim), sharded by heads.

    Args:
        bias: the bias of all three, (3 * width,).
        heads: number of heads, a divisor of the width.
    """
    biases = ops.reshape(bias, (3, heads, bias.shape[-1] // (3 * heads)))
    return [sharding.shard(biases[i], (HEADS, None)) for i in range(3)]


def _split_by_heads(kernel: Tensor, heads: int) -> list[Tensor]:
    kernels = ops.reshape(kernel, (-1, 3, heads, kernel.shape[-1] // (3 * heads)))
    return [sharding.shard(kernels[:, i], (None, HEADS, None)) for i in range(3)]


@keras.saving.register_keras_serializable("tftpu")
class Residual(layers.Add):
    """Adds the output of attention or an MLP to its input, both (batch, time, width)."""

    def call(self, inputs: list[Tensor]) -> Tensor:
        return sharding.shard(super().call(inputs), (EXAMPLES, TOKENS, None))
