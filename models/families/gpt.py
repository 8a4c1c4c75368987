"""GPT-2: Radford et al. 2019. Decoder-only, pre-norm, learned positions, tied head."""

import keras
from keras import layers, ops

from tftpu.models.layers.attention import attention
from tftpu.models.layers.heads import vocabulary_logits
from tftpu.models.layers.token_model import TokenModel, token_inputs
from tftpu.models.sizes import GPT


def build(config: GPT) -> keras.Model:
    """A language model: token ids (batch, time), int32 -> logits (batch, time, vocabulary)."""
    inputs = token_inputs()
    normal = keras.initializers.RandomNormal(stddev=0.02)
    embed = layers.Embedding(
        config.vocabulary, config.width, embeddings_initializer=normal, name="tokens_embed"
    )
    x = embed(inputs["tokens"])  # (batch, time, width)
    x = Positions(config.context, name="positions_embed")(x, inputs["positions"])
    if config.dropout:
        x = layers.Dropout(config.dropout, name="embed_dropout")(x)
    borders = [x]
    for block in range(config.layers):
        x = _block(x, inputs["segments"], config, name=f"block{block + 1}")
        borders.append(x)
    x = layers.LayerNormalization(epsilon=1e-5, name="final_norm")(x)
    logits = TiedHead(embed, dtype="float32", name="head")(x)
    model = TokenModel(inputs, logits, name=config.name)
    return model.with_remat(config.remat, borders, inputs["segments"])


def _block(x, segments, config: GPT, name: str):
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
    y = CausalSelfAttention(
        config.heads, config.layers, config.attention, name=f"{name}_attention"
    )(y, segments)
    if config.dropout:
        y = layers.Dropout(config.dropout, name=f"{name}_dropout1")(y)
    x = layers.Add(name=f"{name}_add1")([x, y])
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(x)
    y = layers.Dense(
        4 * config.width, kernel_initializer=_normal(), name=f"{name}_expand", activation=_gelu
    )(y)
    y = layers.Dense(
        config.width, kernel_initializer=_residual_init(config.layers), name=f"{name}_contract"
    )(y)
    if config.dropout:
        y = layers.Dropout(config.dropout, name=f"{name}_dropout2")(y)
    return layers.Add(name=f"{name}_add2")([x, y])


class Positions(layers.Layer):
    """Adds a learned vector for each position."""

    def __init__(self, context: int, **kwargs):
        super().__init__(**kwargs)
        self.context = context

    def build(self, x_shape, positions_shape=None):
        self.vectors = self.add_weight(
            shape=(self.context, x_shape[-1]), initializer=_normal(), name="positions"
        )

    def call(self, x, positions=None):
        time = ops.shape(x)[1]
        if isinstance(time, int) and time > self.context:
            raise ValueError(
                f"A sequence of {time} tokens is longer than the model's context of "
                f"{self.context}: shorten it, or raise model.context."
            )
        if positions is not None:
            return x + ops.cast(ops.take(self.vectors, positions, axis=0), x.dtype)
        return x + ops.cast(self.vectors[:time], x.dtype)

    def compute_output_shape(self, x_shape, positions_shape=None):
        return x_shape

    def get_config(self):
        return {**super().get_config(), "context": self.context}


class CausalSelfAttention(layers.Layer):
    """Multi-head attention in which a token sees itself and those before it in its segment."""

    def __init__(self, heads: int, depth: int, implementation: str = "plain", **kwargs):
        super().__init__(**kwargs)
        self.heads = heads
        self.depth = depth
        self.implementation = implementation

    def build(self, x_shape, segments_shape=None):
        width = x_shape[-1]
        self.qkv = layers.Dense(
            3 * width, kernel_initializer=_normal(), dtype=self.dtype_policy, name="qkv"
        )
        self.qkv.build(x_shape)
        self.out = layers.Dense(
            width,
            kernel_initializer=_residual_init(self.depth),
            dtype=self.dtype_policy,
            name="out",
        )
        self.out.build(x_shape)

    def call(self, x, segments=None):
        batch, time, width = ops.shape(x)
        q, k, v = self._projections(x, (batch, time, self.heads, width // self.heads))
        y = attention(
            q, k, v, causal=True, segment_ids=segments, implementation=self.implementation
        )
        return self.out(ops.reshape(y, (batch, time, width)))

    def _projections(self, x, shape):
        """Queries, keys and values, each of `shape`: (batch, time, heads, head_dim)."""
        if self.implementation == "flash":  # reads them in the order that one product writes
            return [ops.reshape(part, shape) for part in ops.split(self.qkv(x), 3, axis=-1)]
        # Three products, each written in the order that attention reads; what cuts one in three,
        # and joins its gradients, copies activations.
        kernel, bias = (ops.cast(weight, x.dtype) for weight in (self.qkv.kernel, self.qkv.bias))
        kernel = ops.reshape(kernel, (-1, 3, *shape[2:]))
        bias = ops.reshape(bias, (3, *shape[2:]))
        return [ops.einsum("btc,chd->bthd", x, kernel[:, i]) + bias[i] for i in range(3)]

    def compute_output_shape(self, x_shape, segments_shape=None):
        return x_shape

    def get_config(self):
        own = {"heads": self.heads, "depth": self.depth, "implementation": self.implementation}
        return {**super().get_config(), **own}


class TiedHead(layers.Layer):
    """Logits by the token embedding's own matrix, in float32."""

    def __init__(self, embedding: layers.Embedding, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.embedding = embedding

    def call(self, x):
        return vocabulary_logits(x, self.embedding.embeddings)

    def get_config(self):
        return {
            **super().get_config(),
            "embedding": keras.saving.serialize_keras_object(self.embedding),
        }

    @classmethod
    def from_config(cls, config):
        config["embedding"] = keras.saving.deserialize_keras_object(config["embedding"])
        return cls(**config)


def _gelu(x):
    return keras.activations.gelu(x, approximate=True)


def _normal():
    return keras.initializers.RandomNormal(stddev=0.02)


def _residual_init(depth: int):
    """Smaller where a block writes to the residual stream: 2 * depth writes add up."""
    return keras.initializers.RandomNormal(stddev=0.02 / (2 * depth) ** 0.5)
