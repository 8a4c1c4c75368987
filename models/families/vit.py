"""Vision Transformer: Dosovitskiy et al. 2020 (https://arxiv.org/abs/2010.11929).

With `pooling="mean"` it is the simpler variant of Beyer et al. 2022
(https://arxiv.org/abs/2205.01580): no class token, fixed sine and cosine positions, and the mean
over patches.
"""

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import layers

from tftpu.models.blocks.block_model import BlockModel, Structure
from tftpu.models.layers.convolution import CHANNELS_LAST, Conv2D
from tftpu.models.layers.dense import Dense
from tftpu.models.layers.gelu import gelu
from tftpu.models.layers.layer_norm import LayerNormalization
from tftpu.models.layers.self_attention import SelfAttention
from tftpu.models.layers.stochastic_depth import StochasticDepth
from tftpu.models.layers.tensor_parallel import Residual
from tftpu.tensors import Tensor, ops

if TYPE_CHECKING:
    from tftpu.models.sizes import ViT


def build(config: "ViT") -> keras.Model:
    """Builds a classifier.

    It maps images, (batch, image_size, image_size, channels) float, to logits, (batch,
    num_classes) float32.
    """
    images = keras.Input((config.image_size, config.image_size, config.channels), name="image")
    x = Conv2D(
        config.width,
        config.patch,
        strides=config.patch,
        kernel_initializer=keras.initializers.LecunNormal(),
        name="patches",
    )(images)
    side = config.image_size // config.patch
    x = layers.Reshape((side * side, config.width), name="flatten")(x)  # (batch, time, width)
    if config.pooling == "token":
        x = ClassToken(name="class_token")(x)
        x = LearnedPositions(name="positions")(x)
    else:
        x = FixedPositions(side, name="positions")(x)
    if config.dropout:
        x = layers.Dropout(config.dropout, name="embed_dropout")(x)
    borders = [x]
    for block in range(config.layers):
        # Deeper blocks are dropped more often.
        drop = config.stochastic_depth * block / max(config.layers - 1, 1)
        x = _apply_block(x, drop, config, name=f"block{block + 1}")
        borders.append(x)
    x = Structure(config, name="structure")(borders)
    x = LayerNormalization(epsilon=1e-6, name="final_norm")(x)
    if config.pooling == "token":
        x = x[:, 0]
    else:
        x = layers.GlobalAveragePooling1D(CHANNELS_LAST, name="pool")(x)
    # Logits start at zero, as in the paper. They are float32, because a softmax in bfloat16 loses
    # too much precision.
    head = Dense(config.num_classes, kernel_initializer="zeros", dtype="float32", name="head")
    return BlockModel(images, head(x), config.name)


def _apply_block(x: Tensor, drop: float, config: "ViT", name: str) -> Tensor:
    y = LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
    y = SelfAttention(config.heads, config.attention, name=f"{name}_attention")(y)
    x = _add(x, y, drop, config, name=f"{name}_add1")
    y = LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
    y = Dense(4 * config.width, activation=gelu, name=f"{name}_expand")(y)
    y = Dense(config.width, name=f"{name}_contract")(y)
    return _add(x, y, drop, config, name=f"{name}_add2")


def _add(x: Tensor, y: Tensor, drop: float, config: "ViT", name: str) -> Tensor:
    if config.dropout:
        y = layers.Dropout(config.dropout, name=f"{name}_dropout")(y)
    if drop:
        y = StochasticDepth(drop, name=f"{name}_drop")(y)
    return Residual(name=name)([x, y])


@keras.saving.register_keras_serializable("tftpu")
class ClassToken(layers.Layer):
    """Prepends a learned token to (batch, time, width); the head reads only that one."""

    def build(self, input_shape: Any) -> None:
        self.token = self.add_weight(
            shape=(1, 1, input_shape[-1]), initializer="zeros", name="token"
        )

    def call(self, x: Tensor) -> Tensor:
        return ops.concatenate(
            [ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1])), x], 1
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        batch, time, width = input_shape
        return (batch, time + 1, width)


@keras.saving.register_keras_serializable("tftpu")
class LearnedPositions(layers.Layer):
    """The sum of an input, (batch, time, width), and a learned vector for each position."""

    def build(self, input_shape: Any) -> None:
        self.positions = self.add_weight(
            shape=input_shape[1:],
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="positions",
        )

    def call(self, x: Tensor) -> Tensor:
        return x + self.positions

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


@keras.saving.register_keras_serializable("tftpu")
class FixedPositions(layers.Layer):
    """Adds sines and cosines of row and column to patches: four vectors, width / 4 channels each.

    Args:
        side: number of rows of patches, and number of patches in a row.
    """

    def __init__(self, side: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.side = side

    def call(self, x: Tensor) -> Tensor:
        quarter = x.shape[-1] // 4
        frequency = 1e4 ** -(np.arange(quarter) / max(quarter - 1, 1))
        row, column = np.mgrid[: self.side, : self.side].reshape(2, -1, 1) * frequency
        waves = [np.sin(column), np.cos(column), np.sin(row), np.cos(row)]
        return x + ops.convert_to_tensor(np.concatenate(waves, -1), x.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "side": self.side}
