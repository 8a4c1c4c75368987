"""EfficientNetV2: Tan & Le 2021 (https://arxiv.org/abs/2104.00298)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import keras
from keras import layers

from tftpu.models.blocks.block_model import BlockModel, Structure
from tftpu.models.layers.convolution import CHANNELS_LAST, Conv2D, DepthwiseConv2D
from tftpu.models.layers.dense import Dense
from tftpu.models.layers.normalization import GhostBatchNormalization
from tftpu.models.layers.stochastic_depth import StochasticDepth
from tftpu.tensors import Initializer, Tensor, ops

if TYPE_CHECKING:
    from tftpu.models.sizes import EfficientNetV2


Block = Callable[..., Tensor]  # `_apply_fused` or `_apply_inverted`


def build(config: "EfficientNetV2") -> keras.Model:
    """Builds a classifier.

    It maps images, (batch, image_size, image_size, channels) float, to logits, (batch,
    num_classes) float32.
    """
    images = keras.Input((config.image_size, config.image_size, config.channels), name="image")
    x = _apply_conv_norm(images, config.stem_width, 3, 2, config, name="stem")
    done, total = 0, sum(config.blocks)
    borders = [x]
    for stage, blocks in enumerate(config.blocks):
        kind = _apply_fused if stage < config.fused_stages else _apply_inverted
        for block in range(blocks):
            x = _apply_residual(
                kind,
                x,
                width=config.widths[stage],
                stride=config.strides[stage] if block == 0 else 1,
                expand=config.expand[stage],
                drop=config.stochastic_depth * done / total,  # deeper blocks are dropped more often
                config=config,
                name=f"stage{stage + 1}_block{block + 1}",
            )
            borders.append(x)
            done += 1
    x = Structure(config, name="structure")(borders)
    x = _apply_conv_norm(x, config.head_width, 1, 1, config, name="top")
    x = layers.GlobalAveragePooling2D(CHANNELS_LAST, name="pool")(x)  # (batch, channels)
    if config.dropout:
        x = layers.Dropout(config.dropout, name="dropout")(x)
    # The logits are float32, because a softmax in bfloat16 loses too much precision.
    head = Dense(
        config.num_classes,
        kernel_initializer=_make_head_init(),
        dtype="float32",
        name="head",
    )
    return BlockModel(images, head(x), config.name)


def _apply_residual(
    block: Block,
    x: Tensor,
    width: int,
    stride: int,
    expand: int,
    drop: float,
    config: "EfficientNetV2",
    name: str,
) -> Tensor:
    """Applies a block, with a shortcut where its output has the shape of its input."""
    y = block(x, width, stride, expand, config, name)
    if stride > 1 or x.shape[-1] != width:
        return y
    if drop:
        y = StochasticDepth(drop, name=f"{name}_drop")(y)
    return layers.Add(name=f"{name}_add")([x, y])


def _apply_fused(
    x: Tensor, width: int, stride: int, expand: int, config: "EfficientNetV2", name: str
) -> Tensor:
    """Applies a Fused-MBConv: a 3x3 convolution expands, a 1x1 contracts; or just one 3x3."""
    if expand == 1:
        return _apply_conv_norm(x, width, 3, stride, config, name=f"{name}_project")
    x = _apply_conv_norm(x, expand * x.shape[-1], 3, stride, config, name=f"{name}_expand")
    return _apply_conv_norm(x, width, 1, 1, config, name=f"{name}_project", activation=None)


def _apply_inverted(
    x: Tensor, width: int, stride: int, expand: int, config: "EfficientNetV2", name: str
) -> Tensor:
    """Applies an MBConv: expand, depthwise 3x3, squeeze and excite, contract."""
    squeezed = max(1, int(x.shape[-1] * config.squeeze))
    if expand > 1:
        x = _apply_conv_norm(x, expand * x.shape[-1], 1, 1, config, name=f"{name}_expand")
    x = DepthwiseConv2D(
        3,
        strides=stride,
        padding="same",
        use_bias=False,
        depthwise_initializer=_init(),
        name=f"{name}_depthwise_conv",
    )(x)
    x = _apply_norm_silu(x, config, name=f"{name}_depthwise")
    x = _squeeze_excite(x, squeezed, name)
    return _apply_conv_norm(x, width, 1, 1, config, name=f"{name}_project", activation=None)


def _squeeze_excite(x: Tensor, squeezed: int, name: str) -> Tensor:
    """Scales each channel by a factor in (0, 1), from all channels' means (Hu et al. 2018).

    Follows https://arxiv.org/abs/1709.01507.
    """
    y = ops.mean(x, axis=(1, 2), keepdims=True)  # (batch, 1, 1, channels)
    y = Conv2D(squeezed, 1, activation="silu", kernel_initializer=_init(), name=f"{name}_squeeze")(
        y
    )
    y = Conv2D(
        x.shape[-1], 1, activation="sigmoid", kernel_initializer=_init(), name=f"{name}_excite"
    )(y)
    return layers.Multiply(name=f"{name}_scale")([x, y])


def _apply_conv_norm(
    x: Tensor,
    filters: int,
    kernel: int,
    stride: int,
    config: "EfficientNetV2",
    name: str,
    activation: str | None = "silu",
) -> Tensor:
    x = Conv2D(
        filters,
        kernel,
        strides=stride,
        padding="same",
        use_bias=False,
        kernel_initializer=_init(),
        name=f"{name}_conv",
    )(x)
    return _apply_norm_silu(x, config, name, activation)


def _apply_norm_silu(
    x: Tensor, config: "EfficientNetV2", name: str, activation: str | None = "silu"
) -> Tensor:
    x = GhostBatchNormalization(config.norm_batch, momentum=0.9, epsilon=1e-3, name=f"{name}_norm")(
        x
    )
    return layers.Activation(activation, name=f"{name}_silu")(x) if activation else x


def _make_head_init() -> Initializer:
    return keras.initializers.VarianceScaling(1 / 3, "fan_out", "uniform")


def _init() -> Initializer:
    return keras.initializers.VarianceScaling(2.0, "fan_out", "truncated_normal")
