"""Llama: Touvron et al. 2023 (https://arxiv.org/abs/2302.13971), and its successors by size.

Decoder-only, pre-norm by RMS (Zhang & Sennrich 2019), rotary positions (Su et al. 2021), SwiGLU
(Shazeer 2020), grouped-query attention (Ainslie et al. 2023), no biases.
"""

import math

import keras
import numpy as np
from keras import layers, ops

from tftpu.models.families.gpt import TiedHead
from tftpu.models.layers.attention import attention
from tftpu.models.layers.token_model import TokenModel, token_inputs
from tftpu.models.sizes import Llama


def build(config: Llama) -> keras.Model:
    """A language model: token ids (batch, time), int32 -> logits (batch, time, vocabulary)."""
    inputs = token_inputs()
    embed = layers.Embedding(
        config.vocabulary, config.width, embeddings_initializer=_normal(), name="tokens_embed"
    )
    x = embed(inputs["tokens"])  # (batch, time, width)
    borders = [x]
    for block in range(config.layers):
        x = _block(x, inputs["segments"], inputs["positions"], config, name=f"block{block + 1}")
        borders.append(x)
    x = _norm(x, config, name="final_norm")
    if config.tied:
        logits = TiedHead(embed, dtype="float32", name="head")(x)
    else:
        logits = _dense(config.vocabulary, dtype="float32", name="head")(x)
    model = TokenModel(inputs, logits, name=config.name)
    return model.with_remat(config.remat, borders, inputs["segments"], inputs["positions"])


def _block(x, segments, positions, config: Llama, name: str):
    y = _norm(x, config, name=f"{name}_norm1")
    y = RotaryAttention(
        config.heads,
        config.kv_heads,
        config.rope_base,
        config.rope_scaling,
        config.attention,
        name=f"{name}_attention",
    )(y, segments, positions)
    x = layers.Add(name=f"{name}_add1")([x, y])
    y = _norm(x, config, name=f"{name}_norm2")
    gate = _dense(config.hidden, activation="silu", name=f"{name}_gate")(y)
    y = layers.Multiply(name=f"{name}_swiglu")(
        [gate, _dense(config.hidden, name=f"{name}_expand")(y)]
    )
    y = _dense(config.width, name=f"{name}_contract")(y)
    return layers.Add(name=f"{name}_add2")([x, y])


class RotaryAttention(layers.Layer):
    """Causal self-attention whose queries and keys are turned by their positions.

    Args:
        heads: of the queries.
        kv_heads: of keys and values, a divisor of `heads`.
        base: the longest wavelength is about 2 pi times it.
        scaling: 1.0, or the factor by which Llama 3.1 stretches the long wavelengths.
        implementation: of `tftpu.models.layers.attention.attention`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        base: float = 1e4,
        scaling: float = 1.0,
        implementation: str = "plain",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.heads = heads
        self.kv_heads = kv_heads
        self.base = base
        self.scaling = scaling
        self.implementation = implementation

    def build(self, x_shape, segments_shape=None, positions_shape=None):
        width = x_shape[-1]
        head_dim = width // self.heads

        def dense(heads, name):
            layer = _dense(heads * head_dim, dtype=self.dtype_policy, name=name)
            layer.build(x_shape)
            return layer

        self.query = dense(self.heads, "query")
        self.key = dense(self.kv_heads, "key")
        self.value = dense(self.kv_heads, "value")
        self.out = dense(self.heads, "out")

    def call(self, x, segments=None, positions=None):
        batch, time, width = ops.shape(x)
        head_dim = width // self.heads
        if positions is None:
            positions = ops.arange(time)[None]
        angles = ops.cast(positions, "float32")[..., None] * frequencies(
            head_dim, self.base, self.scaling
        )  # (batch, time, head_dim / 2)

        def heads(dense, count):
            return ops.reshape(dense(x), (batch, time, count, head_dim))

        y = attention(
            rotate(heads(self.query, self.heads), angles),
            rotate(heads(self.key, self.kv_heads), angles),
            heads(self.value, self.kv_heads),
            causal=True,
            segment_ids=segments,
            implementation=self.implementation,
        )
        return self.out(ops.reshape(y, (batch, time, width)))

    def compute_output_shape(self, x_shape, segments_shape=None, positions_shape=None):
        return x_shape

    def get_config(self):
        return {
            **super().get_config(),
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "base": self.base,
            "scaling": self.scaling,
            "implementation": self.implementation,
        }


def rotate(x, angles):
    """Turns each pair (x[i], x[i + head_dim / 2]) by its angle.

    Args:
        x: (batch, time, heads, head_dim).
        angles: (batch or 1, time, head_dim / 2), radians, float32: bfloat16 has too few bits for
            the position of a token.
    """
    cosine, sine = (
        ops.cast(wave(angles)[:, :, None], x.dtype) for wave in (ops.cos, ops.sin)
    )  # (batch, time, 1, head_dim / 2)
    first, second = ops.split(x, 2, axis=-1)
    return ops.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def frequencies(head_dim: int, base: float, scaling: float) -> np.ndarray:
    """Radians a position, of each of head_dim / 2 pairs, float32.

    With a scaling above 1, waves longer than 8192 positions are stretched by it, those shorter than
    a quarter of that are not, and those between by degrees (Dubey et al. 2024, Llama 3.1).
    """
    frequency = base ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling > 1.0:
        turns = 8192 * frequency / (2 * math.pi)  # within the context that was first trained on
        kept = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        frequency = frequency * (kept + (1.0 - kept) / scaling)
    return frequency.astype("float32")


def _dense(units: int, **options):
    return layers.Dense(units, use_bias=False, kernel_initializer=_normal(), **options)


def _norm(x, config: Llama, name: str):
    return layers.RMSNormalization(epsilon=config.epsilon, name=name)(x)


def _normal():
    return keras.initializers.RandomNormal(stddev=0.02)
