"""BERT: Devlin et al. 2018 (https://arxiv.org/abs/1810.04805). Encoder-only, post-norm."""

from typing import TYPE_CHECKING, Any

import keras
from keras import layers

from tftpu.models.blocks.block_model import Structure
from tftpu.models.blocks.token_model import TokenModel, build_token_inputs
from tftpu.models.layers.dense import Dense, read_embeddings
from tftpu.models.layers.gelu import gelu
from tftpu.models.layers.heads import Tied
from tftpu.models.layers.layer_norm import LayerNormalization
from tftpu.models.layers.self_attention import SelfAttention
from tftpu.models.layers.tensor_parallel import Residual
from tftpu.tensors import Initializer, Tensor, ops

if TYPE_CHECKING:
    from tftpu.models.sizes import BERT


def build(config: "BERT") -> keras.Model:
    """Builds an encoder of token ids, (batch, time) int32, with one of two heads.

    With head="masked_lm" it returns logits, (batch, time, vocabulary); with head="classes" logits
    from the first token, (batch, num_classes); both float32. In addition to the features of
    `TokenModel` it takes "types", (batch, time) int32: 0 in the first of two sentences, 1 in the
    second, by default 0. Padding is marked by "segments".
    """
    inputs = build_token_inputs("types")
    embed = layers.Embedding(
        config.vocabulary, config.width, embeddings_initializer=_init(), name="tokens_embed"
    )
    x = embed(inputs["tokens"])  # (batch, time, width)
    x = PositionsAndTypes(config.context, config.types, name="positions_embed")(
        x, inputs["positions"], inputs["types"]
    )
    x = _apply_norm(x, name="embed_norm")
    if config.dropout:
        x = layers.Dropout(config.dropout, name="embed_dropout")(x)
    borders = [x]
    for block in range(config.layers):
        x = _apply_block(x, inputs["segments"], config, name=f"block{block + 1}")
        borders.append(x)
    x = Structure(config, shared=("segments",), name="structure")(borders)
    if config.head == "masked_lm":
        x = _apply_dense(x, config.width, activation=gelu, name="head_transform")
        x = _apply_norm(x, name="head_norm")
        logits = TiedHeadWithBias(embed, dtype="float32", name="head")(x)
    else:
        x = _apply_dense(x[:, 0], config.width, activation="tanh", name="pool")  # (batch, width)
        if config.dropout:
            x = layers.Dropout(config.dropout, name="head_dropout")(x)
        logits = _apply_dense(x, config.num_classes, dtype="float32", name="head")
    return TokenModel(inputs, logits, config.name)


def _apply_block(x: Tensor, segments: Tensor, config: "BERT", name: str) -> Tensor:
    y = SelfAttention(config.heads, config.attention, name=f"{name}_attention")(x, segments)
    x = _add_norm(x, y, config, name=f"{name}_norm1")
    y = _apply_dense(x, 4 * config.width, activation=gelu, name=f"{name}_expand")
    y = _apply_dense(y, config.width, name=f"{name}_contract")
    return _add_norm(x, y, config, name=f"{name}_norm2")


def _add_norm(x: Tensor, y: Tensor, config: "BERT", name: str) -> Tensor:
    if config.dropout:
        y = layers.Dropout(config.dropout, name=f"{name}_dropout")(y)
    return _apply_norm(Residual(name=f"{name}_add")([x, y]), name)


@keras.saving.register_keras_serializable("tftpu")
class PositionsAndTypes(layers.Layer):
    """The sum of its input and a learned vector per position and per sentence type.

    Args:
        context: number of positions.
        types: number of sentence types.

    Raises:
        ValueError: the sequence is longer than `context`.
    """

    def __init__(self, context: int, types: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.context = context
        self.types = types

    # Keras names the shapes after the arguments of `call`.
    def build(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_shape: Any, positions_shape: Any = None, types_shape: Any = None
    ) -> None:
        width = x_shape[-1]
        self.position_vectors = self.add_weight(
            shape=(self.context, width), initializer=_init(), name="positions"
        )
        self.type_vectors = self.add_weight(
            shape=(self.types, width), initializer=_init(), name="types"
        )

    def call(
        self, x: Tensor, positions: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        time = ops.shape(x)[1]
        if isinstance(time, int) and time > self.context:
            raise ValueError(
                f"A sequence has {time} tokens, more than the model's context of {self.context}: "
                f"raise it with --config.model.context={time}, or shorten the sequences with "
                f"--config.data.context={self.context}."
            )
        if positions is None:
            x = x + self.position_vectors[:time]
        else:
            x = x + ops.take(self.position_vectors, positions, axis=0)
        if types is None:
            return x + self.type_vectors[0]
        return x + ops.take(self.type_vectors, types, axis=0)

    def compute_output_shape(
        self, x_shape: Any, positions_shape: Any = None, types_shape: Any = None
    ) -> Any:
        return x_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "context": self.context, "types": self.types}


@keras.saving.register_keras_serializable("tftpu")
class TiedHeadWithBias(Tied):
    """Logits as hidden states times the transposed token embedding, plus a bias, in float32.

    Args: as for `Tied`.
    """

    def build(self, input_shape: Any) -> None:
        self.bias = self.add_weight(
            shape=(self.embedding.input_dim,), initializer="zeros", name="bias"
        )

    def call(self, x: Tensor) -> Tensor:
        matrix = ops.cast(read_embeddings(self.embedding), x.dtype)
        return ops.matmul(x, ops.transpose(matrix)) + self.bias


def _apply_dense(x: Tensor, units: int, **options: Any) -> Tensor:
    return Dense(units, kernel_initializer=_init(), **options)(x)


def _apply_norm(x: Tensor, name: str) -> Tensor:
    return LayerNormalization(epsilon=1e-12, name=name)(x)


def _init() -> Initializer:
    return keras.initializers.TruncatedNormal(stddev=0.02)
