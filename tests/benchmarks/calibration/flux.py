"""The diffusion transformer FLUX.1 (Black Forest Labs 2024), as published training steps run it.

Sizes are those of the model's config; text and image are one sequence from the first block on, of
which the double blocks project each part by other weights. Queries and keys are normalized
and rotated by head, and attention is tftpu's kernel.
"""

from typing import Any

import keras
import numpy as np
from keras import layers

from tftpu.kernels.attention import attention
from tftpu.tensors import ops

WIDTH, HEADS, HIDDEN, DOUBLE, SINGLE = 3072, 24, 4 * 3072, 19, 38
TEXT, SIDE = 512, 64  # tokens of a text, and patches along each side of an image of 1,024 pixels
IMAGE_CHANNELS, TEXT_WIDTH, POOLED_WIDTH = 64, 4096, 768
_AXES = (16, 56, 56)  # channels of a head that each coordinate of a token rotates
FREQUENCIES = 256


class _Norm(layers.Layer):
    """A layer norm without weights, then scaled and shifted by numbers of the example."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization(epsilon=1e-6, center=False, scale=False)

    def build(self, input_shape: Any) -> None:
        self.norm.build(input_shape)

    def call(self, x: Any, shift: Any, scale: Any) -> Any:
        return (1 + scale) * self.norm(x) + shift


class _Attention(layers.Layer):
    """Norms of queries and keys, their rotation, and attention over text and image."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.query_norm = layers.RMSNormalization(epsilon=1e-6)
        self.key_norm = layers.RMSNormalization(epsilon=1e-6)
        self.cosine, self.sine = _compute_rotation()

    def build(self, input_shape: Any) -> None:
        for norm in (self.query_norm, self.key_norm):
            norm.build((None, None, None, WIDTH // HEADS))

    def call(self, x: Any) -> Any:
        heads = ops.reshape(x, (*x.shape[:2], 3, HEADS, WIDTH // HEADS))
        query, key = self.query_norm(heads[:, :, 0]), self.key_norm(heads[:, :, 1])
        query, key = self._rotate(query), self._rotate(key)
        found = attention(query, key, heads[:, :, 2], implementation="flash")
        return ops.reshape(found, (*x.shape[:2], WIDTH))

    def _rotate(self, x: Any) -> Any:
        cosine, sine = ops.cast(self.cosine, x.dtype), ops.cast(self.sine, x.dtype)
        first, second = ops.split(x, 2, axis=-1)
        return ops.concatenate(
            [first * cosine - second * sine, first * sine + second * cosine], axis=-1
        )


class DoubleBlock(layers.Layer):
    """A block that projects text and image by weights of their own."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.attention = _Attention()
        self.parts = [
            {
                "modulation": layers.Dense(6 * WIDTH),
                "norm": _Norm(),
                "qkv": layers.Dense(3 * WIDTH),
                "project": layers.Dense(WIDTH),
                "second_norm": _Norm(),
                "expand": layers.Dense(HIDDEN),
                "contract": layers.Dense(WIDTH),
            }
            for _ in range(2)
        ]

    def build(self, x_shape: Any, condition_shape: Any) -> None:
        self.attention.build(x_shape)
        for part in self.parts:
            for name, layer in part.items():
                inputs = (*x_shape[:2], HIDDEN) if name == "contract" else x_shape
                layer.build(condition_shape if name == "modulation" else inputs)

    def call(self, x: Any, condition: Any) -> Any:
        split = [x[:, :TEXT], x[:, TEXT:]]
        numbers = [
            ops.split(part["modulation"](ops.silu(condition))[:, None], 6, axis=-1)
            for part in self.parts
        ]
        projected = [
            part["qkv"](part["norm"](y, *n[:2])) for part, y, n in zip(self.parts, split, numbers)
        ]
        mixed = self.attention(ops.concatenate(projected, axis=1))
        found = []
        for part, y, n, seen in zip(self.parts, split, numbers, (mixed[:, :TEXT], mixed[:, TEXT:])):
            y = y + n[2] * part["project"](seen)
            hidden = ops.gelu(part["expand"](part["second_norm"](y, *n[3:5])), approximate=True)
            found.append(y + n[5] * part["contract"](hidden))
        return ops.concatenate(found, axis=1)


class SingleBlock(layers.Layer):
    """A block with attention beside its dense layers, and one set of weights."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.attention, self.norm = _Attention(), _Norm()
        self.modulation = layers.Dense(3 * WIDTH)
        self.first = layers.Dense(3 * WIDTH + HIDDEN)
        self.second = layers.Dense(WIDTH)

    def build(self, x_shape: Any, condition_shape: Any) -> None:
        for layer in (self.attention, self.norm, self.first):
            layer.build(x_shape)
        self.modulation.build(condition_shape)
        self.second.build((*x_shape[:2], WIDTH + HIDDEN))

    def call(self, x: Any, condition: Any) -> Any:
        numbers = ops.split(self.modulation(ops.silu(condition))[:, None], 3, axis=-1)
        y = self.first(self.norm(x, *numbers[:2]))
        mixed = self.attention(y[:, :, : 3 * WIDTH])
        hidden = ops.gelu(y[:, :, 3 * WIDTH :], approximate=True)
        return x + numbers[2] * self.second(ops.concatenate([mixed, hidden], axis=-1))


def build_flux() -> keras.Model:
    """Returns the model, from latent patches, text and time to the patches' velocity."""
    image = keras.Input((SIDE**2, IMAGE_CHANNELS), name="image")
    text = keras.Input((TEXT, TEXT_WIDTH), name="text")
    pooled = keras.Input((POOLED_WIDTH,), name="pooled")
    time = keras.Input((FREQUENCIES,), name="time")  # sines and cosines of the time
    guidance = keras.Input((FREQUENCIES,), name="guidance")
    condition = layers.Add()(
        [
            layers.Dense(WIDTH)(layers.Dense(WIDTH, activation="silu")(one))
            for one in (pooled, time, guidance)
        ]
    )
    x = layers.Concatenate(axis=1)([layers.Dense(WIDTH)(text), layers.Dense(WIDTH)(image)])
    for number in range(DOUBLE):
        x = DoubleBlock(name=f"double{number + 1}")(x, condition)
    for number in range(SINGLE):
        x = SingleBlock(name=f"single{number + 1}")(x, condition)
    shift, scale = ops.split(layers.Dense(2 * WIDTH)(ops.silu(condition))[:, None], 2, axis=-1)
    x = _Norm(name="final_norm")(x[:, TEXT:], shift, scale)
    velocity = layers.Dense(IMAGE_CHANNELS, dtype="float32", name="velocity")(x)
    return keras.Model([image, text, pooled, time, guidance], velocity)


def _compute_rotation() -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines for each token, (tokens, 1, head_dim / 2); texts stay at zero."""
    rows, columns = np.indices((SIDE, SIDE)).reshape(2, -1)
    places = np.zeros((TEXT + SIDE**2, 3))
    places[TEXT:, 1], places[TEXT:, 2] = rows, columns
    angles = np.concatenate(
        [
            places[:, axis, None] * 1e4 ** (-np.arange(0, size, 2) / size)
            for axis, size in enumerate(_AXES)
        ],
        axis=1,
    )[:, None]
    return np.cos(angles).astype("float32"), np.sin(angles).astype("float32")
