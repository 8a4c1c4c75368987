"""Llama: Touvron et al. 2023 (https://arxiv.org/abs/2302.13971), and its successors.

Decoder-only, with RMS pre-norm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467), rotary
positions (Su et al. 2021, https://arxiv.org/abs/2104.09864), SwiGLU (Shazeer 2020,
https://arxiv.org/abs/2002.05202), grouped-query attention (Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245) and no biases.
"""

import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import layers

from tftpu.kernels.attention import choose_rotation_kernel
from tftpu.models.blocks.block_model import Structure
from tftpu.models.blocks.token_model import HEAD, FactoredTokenModel, build_token_inputs
from tftpu.models.layers.causal import causal_attention
from tftpu.models.layers.dense import Dense, DenseContainer
from tftpu.models.layers.heads import TiedHead, UntiedHead
from tftpu.models.layers.tensor_parallel import Residual
from tftpu.tensors import Initializer, Tensor, ops

if TYPE_CHECKING:
    from tftpu.models.sizes import Llama


def build(config: "Llama") -> keras.Model:
    """Builds a language model.

    It maps token ids, (batch, time) int32, to logits, (batch, time, vocabulary) float32.
    """
    inputs = build_token_inputs()
    embed = layers.Embedding(
        config.vocabulary, config.width, embeddings_initializer=_make_normal(), name="tokens_embed"
    )
    x = embed(inputs["tokens"])  # (batch, time, width)
    borders = [x]
    for block in range(config.layers):
        x = _apply_block(
            x, inputs["segments"], inputs["positions"], config, name=f"block{block + 1}"
        )
        borders.append(x)
    x = Structure(config, shared=("segments", "positions"), name="structure")(borders)
    x = _apply_norm(x, config, name="final_norm")
    if config.tied:
        head = TiedHead(embed, dtype="float32", name=HEAD)
    else:
        head = UntiedHead(
            config.vocabulary, kernel_initializer=_make_normal(), dtype="float32", name=HEAD
        )
    return FactoredTokenModel(inputs, head(x), config.name)


def _apply_block(
    x: Tensor, segments: Tensor, positions: Tensor, config: "Llama", name: str
) -> Tensor:
    y = _apply_norm(x, config, name=f"{name}_norm1")
    y = RotaryAttention(
        config.heads,
        config.kv_heads,
        config.rope_base,
        config.rope_scaling,
        config.attention,
        name=f"{name}_attention",
    )(y, segments, positions)
    x = Residual(name=f"{name}_add1")([x, y])
    y = _apply_norm(x, config, name=f"{name}_norm2")
    gate = _make_dense(config.hidden, activation="silu", name=f"{name}_gate")(y)
    y = layers.Multiply(name=f"{name}_swiglu")(
        [gate, _make_dense(config.hidden, name=f"{name}_expand")(y)]
    )
    y = _make_dense(config.width, name=f"{name}_contract")(y)
    return Residual(name=f"{name}_add2")([x, y])


@keras.saving.register_keras_serializable("tftpu")
class RotaryAttention(DenseContainer):
    """Causal self-attention whose queries and keys are rotated by their positions.

    Args:
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`.
        base: base of the rotation frequencies; the longest wavelength is about 2 pi times this.
        scaling: 1.0, or the factor by which Llama 3.1 stretches long wavelengths.
        implementation: see `tftpu.kernels.attention.attention`.
        kwargs: as for `DenseContainer`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        base: float = 1e4,
        scaling: float = 1.0,
        implementation: str = "plain",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.heads = heads
        self.kv_heads = kv_heads
        self.base = base
        self.scaling = scaling
        self.implementation = implementation

    # Keras passes the shapes by the names of the arguments of `call`.
    def build(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_shape: Any, segments_shape: Any = None, positions_shape: Any = None
    ) -> None:
        width = x_shape[-1]
        head_dim = width // self.heads

        def build_part(heads: int, name: str) -> Dense:
            return self.build_dense(name, heads * head_dim, x_shape, **_build_plain_options())

        self.query = build_part(self.heads, "query")
        self.key = build_part(self.kv_heads, "key")
        self.value = build_part(self.kv_heads, "value")
        self.out = build_part(self.heads, "out")

    def call(
        self, x: Tensor, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        batch, time, width = ops.shape(x)
        head_dim = width // self.heads
        if positions is None:
            positions = ops.arange(time)[None]
        angles = ops.cast(positions, "float32")[..., None] * compute_frequencies(
            head_dim, self.base, self.scaling
        )  # (batch, time, head_dim / 2)

        def split_heads(flat: Tensor) -> Tensor:
            # If the batch size is unknown, Keras cannot infer the number of heads from -1.
            return ops.reshape(flat, (batch, time, flat.shape[-1] // head_dim, head_dim))

        y = causal_attention(
            self.name,
            split_heads(rotate(self.query(x), angles, self.implementation)),
            split_heads(rotate(self.key(x), angles, self.implementation)),
            split_heads(self.value(x)),
            segments,
            self.implementation,
        )
        return self.out(ops.reshape(y, (batch, time, width)))

    def compute_output_shape(
        self, x_shape: Any, segments_shape: Any = None, positions_shape: Any = None
    ) -> Any:
        return x_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "base": self.base,
            "scaling": self.scaling,
            "implementation": self.implementation,
        }


def rotate(x: Tensor, angles: Tensor, implementation: str = "plain") -> Tensor:
    """Rotates each pair (x[i], x[i + head_dim / 2]) of a head by its angle.

    Args:
        x: heads side by side, (batch, time, heads x head_dim).
        angles: (batch or 1, time, head_dim / 2), radians, float32: bfloat16 has too few bits for
            the position of a token.
        implementation: see `tftpu.kernels.attention.attention`.

    Returns:
        (batch, time, heads x head_dim), of x's dtype.
    """
    cosine, sine = ops.cos(angles), ops.sin(angles)
    heads = x.shape[-1] // (2 * angles.shape[-1])
    kernel = choose_rotation_kernel(implementation, x, heads)
    if kernel is not None:
        return kernel(x, cosine, sine, heads)
    cosine, sine = (ops.cast(wave[:, :, None], x.dtype) for wave in (cosine, sine))
    by_head = ops.reshape(x, (*ops.shape(x)[:2], heads, -1))
    first, second = ops.split(by_head, 2, axis=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return ops.reshape(ops.concatenate(turned, -1), ops.shape(x))


def compute_frequencies(head_dim: int, base: float, scaling: float) -> np.ndarray:
    """Returns the radians by which one position rotates each pair: (head_dim / 2,), float32.

    A scaling above 1 stretches wavelengths of more than 8192 positions, keeps those of less than a
    quarter of 8192, and interpolates between the two (Dubey et al. 2024,
    https://arxiv.org/abs/2407.21783).
    """
    frequency = base ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling > 1.0:
        # Turns of each frequency within the original context.
        turns = 8192 * frequency / (2 * math.pi)
        kept = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        frequency = frequency * (kept + (1.0 - kept) / scaling)
    return frequency.astype("float32")


def _make_dense(units: int, **options: Any) -> Dense:
    return Dense(units, **_build_plain_options(), **options)


def _build_plain_options() -> dict[str, Any]:
    return {"use_bias": False, "kernel_initializer": _make_normal()}


def _apply_norm(x: Tensor, config: "Llama", name: str) -> Tensor:
    return layers.RMSNormalization(epsilon=config.epsilon, name=name)(x)


def _make_normal() -> Initializer:
    return keras.initializers.RandomNormal(stddev=0.02)
