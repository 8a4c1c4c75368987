"""GPT-2: Radford et al. 2019, "Language models are unsupervised multitask learners".

Decoder-only, pre-norm, learned positions, tied head.
"""

from typing import TYPE_CHECKING, Any

import keras
from keras import layers

from tftpu import sharding
from tftpu.models.blocks.block_model import Structure
from tftpu.models.blocks.token_model import HEAD, FactoredTokenModel, build_token_inputs
from tftpu.models.layers.causal import causal_attention
from tftpu.models.layers.dense import Dense, DenseContainer
from tftpu.models.layers.heads import TiedHead
from tftpu.models.layers.layer_norm import LayerNormalization
from tftpu.models.layers.tensor_parallel import Residual, project_heads, split_biases
from tftpu.sharding import HEADS
from tftpu.tensors import Initializer, Tensor, ops

if TYPE_CHECKING:
    from tftpu.models.sizes import GPT


def build(config: "GPT") -> keras.Model:
    """Builds a language model.

    It maps token ids, (batch, time) int32, to logits, (batch, time, vocabulary) float32.
    """
    inputs = build_token_inputs()
    embed = layers.Embedding(
        config.vocabulary, config.width, embeddings_initializer=_make_normal(), name="tokens_embed"
    )
    x = embed(inputs["tokens"])  # (batch, time, width)
    x = Positions(config.context, name="positions_embed")(x, inputs["positions"])
    if config.dropout:
        x = layers.Dropout(config.dropout, name="embed_dropout")(x)
    borders = [x]
    for block in range(config.layers):
        x = _apply_block(x, inputs["segments"], config, name=f"block{block + 1}")
        borders.append(x)
    x = Structure(config, shared=("segments",), name="structure")(borders)
    x = LayerNormalization(epsilon=1e-5, name="final_norm")(x)
    logits = TiedHead(embed, dtype="float32", name=HEAD)(x)
    return FactoredTokenModel(inputs, logits, config.name)


def _apply_block(x: Tensor, segments: Tensor, config: "GPT", name: str) -> Tensor:
    y = LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
    y = CausalSelfAttention(
        config.heads, config.layers, config.attention, name=f"{name}_attention"
    )(y, segments)
    if config.dropout:
        y = layers.Dropout(config.dropout, name=f"{name}_dropout1")(y)
    x = Residual(name=f"{name}_add1")([x, y])
    y = LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(x)
    y = Dense(
        4 * config.width, kernel_initializer=_make_normal(), name=f"{name}_expand", activation=_gelu
    )(y)
    y = Dense(
        config.width, kernel_initializer=_make_residual_init(config.layers), name=f"{name}_contract"
    )(y)
    if config.dropout:
        y = layers.Dropout(config.dropout, name=f"{name}_dropout2")(y)
    return Residual(name=f"{name}_add2")([x, y])


@keras.saving.register_keras_serializable("tftpu")
class Positions(layers.Layer):
    """The sum of an input, (batch, time, width), and a learned vector for each position.

    Args:
        context: number of positions.

    Raises:
        ValueError: the sequence is longer than `context`.
    """

    def __init__(self, context: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.context = context

    # Keras passes the shapes by the names of the arguments of `call`.
    def build(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_shape: Any, positions_shape: Any = None
    ) -> None:
        self.vectors = self.add_weight(
            shape=(self.context, x_shape[-1]), initializer=_make_normal(), name="positions"
        )

    def call(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        time = ops.shape(x)[1]
        if isinstance(time, int) and time > self.context:
            raise ValueError(
                f"A sequence has {time} tokens, more than the model's context of {self.context}: "
                f"raise it with --config.model.context={time}, or shorten the sequences with "
                f"--config.data.context={self.context}."
            )
        if positions is not None:
            return x + ops.cast(ops.take(self.vectors, positions, axis=0), x.dtype)
        return x + ops.cast(self.vectors[:time], x.dtype)

    def compute_output_shape(self, x_shape: Any, positions_shape: Any = None) -> Any:
        return x_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "context": self.context}


@keras.saving.register_keras_serializable("tftpu")
class CausalSelfAttention(DenseContainer):
    """Multi-head attention of each token to itself and to earlier ones of its segment.

    Args:
        heads: number of heads, a divisor of the width.
        depth: number of blocks in the model, which scales the initial weights.
        implementation: see `tftpu.kernels.attention.attention`.
        kwargs: as for `DenseContainer`.
    """

    def __init__(self, heads: int, depth: int, implementation: str = "plain", **kwargs: Any):
        super().__init__(**kwargs)
        self.heads = heads
        self.depth = depth
        self.implementation = implementation

    # Keras passes the shapes by the names of the arguments of `call`.
    def build(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_shape: Any, segments_shape: Any = None
    ) -> None:
        width = x_shape[-1]
        self.qkv = self.build_dense("qkv", 3 * width, x_shape, kernel_initializer=_make_normal())
        residual = _make_residual_init(self.depth)
        self.out = self.build_dense("out", width, x_shape, kernel_initializer=residual)

    def call(self, x: Tensor, segments: Tensor | None = None) -> Tensor:
        batch, time, width = ops.shape(x)
        q, k, v = self._project(x, (batch, time, self.heads, width // self.heads))
        y = causal_attention(self.name, q, k, v, segments, self.implementation)
        return self.out(ops.reshape(y, (batch, time, width)))

    def _project(self, x: Tensor, shape: tuple[Any, ...]) -> list[Tensor]:
        """Returns queries, keys and values, each of `shape`: (batch, time, heads, head_dim)."""
        # The flash kernel reads (batch, time, width), as one product for all three writes it. Its
        # columns hold queries, keys and values in turn, so they cannot be sharded by heads.
        if self.implementation == "flash" and not sharding.is_sharded(HEADS):
            return [ops.reshape(part, shape) for part in ops.split(self.qkv(x), 3, axis=-1)]
        # Three products, each written in the layout that attention reads. Splitting one product
        # into three and joining the gradients would copy activations.
        bias = split_biases(ops.cast(self.qkv.bias, x.dtype), self.heads)
        parts = project_heads(self.qkv, x, self.heads, "btc,chd->bthd")
        return [part + bias for part, bias in zip(parts, bias)]

    def compute_output_shape(self, x_shape: Any, segments_shape: Any = None) -> Any:
        return x_shape

    def get_config(self) -> dict[str, Any]:
        own = {"heads": self.heads, "depth": self.depth, "implementation": self.implementation}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable("tftpu")
def _gelu(x: Tensor) -> Tensor:
    return keras.activations.gelu(x, approximate=True)


def _make_normal() -> Initializer:
    return keras.initializers.RandomNormal(stddev=0.02)


def _make_residual_init(depth: int) -> Initializer:
    """Returns an initializer scaled down for the 2 * depth writes to the residual stream."""
    return keras.initializers.RandomNormal(stddev=0.02 / (2 * depth) ** 0.5)
