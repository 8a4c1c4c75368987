"""ConvNeXt: Liu et al. 2022 (https://arxiv.org/abs/2201.03545)."""

from typing import TYPE_CHECKING, Any

import keras
from keras import layers

from tftpu.models.blocks.block_model import BlockModel, Structure
from tftpu.models.layers.convolution import CHANNELS_LAST, Conv2D, DepthwiseConv2D
from tftpu.models.layers.dense import Dense
from tftpu.models.layers.gelu import gelu
from tftpu.models.layers.layer_norm import LayerNormalization
from tftpu.models.layers.stochastic_depth import StochasticDepth
from tftpu.tensors import Initializer, Tensor

if TYPE_CHECKING:
    from tftpu.models.sizes import ConvNeXt


def build(config: "ConvNeXt") -> keras.Model:
    """Builds a classifier.

    It maps images, (batch, image_size, image_size, channels) float, to logits, (batch,
    num_classes) float32.
    """
    images = keras.Input((config.image_size, config.image_size, config.channels), name="image")
    x = _apply_conv(
        images, config.widths[0], 4, name="stem_conv"
    )  # (batch, size / 4, size / 4, width)
    x = _apply_norm(x, name="stem_norm")
    done, last = 0, sum(config.blocks) - 1
    borders = [x]
    for stage, (blocks, width) in enumerate(zip(config.blocks, config.widths), 1):
        if stage > 1:
            x = _apply_norm(x, name=f"stage{stage}_norm")
            x = _apply_conv(x, width, 2, name=f"stage{stage}_conv")
        for block in range(1, blocks + 1):
            # Deeper blocks are dropped more often.
            drop = config.stochastic_depth * done / last if last else 0.0
            x = _apply_block(x, width, drop, config, name=f"stage{stage}_block{block}")
            borders.append(x)
            done += 1
    x = Structure(config, name="structure")(borders)
    x = layers.GlobalAveragePooling2D(CHANNELS_LAST, name="pool")(x)  # (batch, channels)
    x = _apply_norm(x, name="head_norm")
    # The logits are float32, because a softmax in bfloat16 loses too much precision.
    head = Dense(config.num_classes, kernel_initializer=_init(), dtype="float32", name="head")
    return BlockModel(images, head(x), config.name)


def _apply_block(x: Tensor, width: int, drop: float, config: "ConvNeXt", name: str) -> Tensor:
    y = DepthwiseConv2D(7, padding="same", depthwise_initializer=_init(), name=f"{name}_depthwise")(
        x
    )
    y = _apply_norm(y, name=f"{name}_norm")
    y = Dense(4 * width, kernel_initializer=_init(), name=f"{name}_expand")(y)
    y = layers.Activation(gelu, name=f"{name}_gelu")(y)
    y = Dense(width, kernel_initializer=_init(), name=f"{name}_contract")(y)
    if config.layer_scale:
        y = LayerScale(config.layer_scale, name=f"{name}_layer_scale")(y)
    if drop:
        y = StochasticDepth(drop, name=f"{name}_drop")(y)
    return layers.Add(name=f"{name}_add")([x, y])


@keras.saving.register_keras_serializable("tftpu")
class LayerScale(layers.Layer):
    """A learned factor for each channel, small at first (Touvron et al. 2021).

    Follows https://arxiv.org/abs/2103.17239.

    Args:
        initial: the initial value of all factors.
    """

    def __init__(self, initial: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.initial = initial

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(
            shape=(input_shape[-1],),
            initializer=keras.initializers.Constant(self.initial),
            name="scale",
        )

    def call(self, x: Tensor) -> Tensor:
        return x * self.scale

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "initial": self.initial}


def _apply_conv(x: Tensor, filters: int, patch: int, name: str) -> Tensor:
    """Applies a convolution to patches that do not overlap."""
    return Conv2D(filters, patch, strides=patch, kernel_initializer=_init(), name=name)(x)


def _apply_norm(x: Tensor, name: str) -> Tensor:
    return LayerNormalization(epsilon=1e-6, name=name)(x)


def _init() -> Initializer:
    return keras.initializers.TruncatedNormal(stddev=0.02)
