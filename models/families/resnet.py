"""ResNet v1.5: He et al. 2015 (https://arxiv.org/abs/1512.03385), with strides in 3x3 layers."""

from typing import TYPE_CHECKING, Any

import keras
from keras import layers

from tftpu.models.blocks.block_model import BlockModel, Structure
from tftpu.models.layers.convolution import CHANNELS_LAST, Conv2D
from tftpu.models.layers.dense import Dense
from tftpu.models.layers.normalization import GhostBatchNormalization
from tftpu.models.layers.pointwise import PointwiseConv, PointwiseNormalization, Sum
from tftpu.tensors import Initializer, Tensor, ops

if TYPE_CHECKING:
    from tftpu.models.sizes import ResNet

# `PointwiseConv` saves time on a TPU if many examples share batch statistics. With 128 examples on
# a core, groups of 32 save nothing; with groups of 64 and 128 the step has a seventh and a fifth
# fewer cycles than with 32 (compiled, v5e). The choice ignores the number of groups per core, so
# that the model is the same on any number of replicas.
LARGE_GROUP = 64
MOST_CHANNELS = 512  # most input channels of a `PointwiseConv`; 1,024 cost more than they save


def build(config: "ResNet") -> keras.Model:
    """Builds a classifier.

    It maps images, (batch, image_size, image_size, channels) float, to logits, (batch,
    num_classes) float32.
    """
    images = keras.Input((config.image_size, config.image_size, config.channels), name="image")
    x = _apply_stem(images, config)
    borders = [x]
    for stage, blocks in enumerate(config.blocks):
        width = config.width * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _apply_residual(x, width, stride, config, name=f"stage{stage + 1}_block{block + 1}")
            borders.append(x)
    x = Structure(config, name="structure")(borders)
    x = layers.GlobalAveragePooling2D(CHANNELS_LAST, name="pool")(x)  # (batch, channels)
    if config.dropout:
        x = layers.Dropout(config.dropout, name="dropout")(x)
    # The logits are float32, because a softmax in bfloat16 loses too much precision.
    logits = Dense(config.num_classes, dtype="float32", name="head")(x)
    return BlockModel(images, logits, config.name)


def _apply_stem(x: Tensor, config: "ResNet") -> Tensor:
    if config.stem == "small":
        return _apply_conv_norm(x, config.width, 3, 1, config, name="stem")
    # The pool's windows begin one pixel before the image. Padding the pool's input would copy it,
    # which takes 3 % of the cycles of a ResNet-50 (compiled, v5e). So the convolution computes
    # those pixels, too.
    inside = (config.image_size + 1) // 2
    outside = (1, inside % 2)
    if config.stem == "space_to_depth":
        x = SpaceToDepthStem(config.width, outside, name="stem_conv")(x)
    else:
        end = 2 * (inside + outside[1]) + 3 - config.image_size
        x = layers.ZeroPadding2D(((5, end), (5, end)), CHANNELS_LAST, name="stem_pad")(x)
        x = Conv2D(
            *(config.width, 7, 2),
            use_bias=False,
            kernel_initializer=_make_he_normal(),
            name="stem_conv",
        )(x)
    x = NormWithin(config.norm_batch, border=outside, name="stem_norm")(x)
    x = layers.MaxPooling2D(3, strides=2, data_format=CHANNELS_LAST, name="stem_pool")(x)
    # ReLU after the pool gives the same result as before it, from a quarter of the elements.
    return layers.ReLU(name="stem_act")(x)


def _apply_residual(x: Tensor, width: int, stride: int, config: "ResNet", name: str) -> Tensor:
    out = 4 * width if config.bottleneck else width
    branch = x
    if config.bottleneck:
        first, second = (stride, 1) if config.stride_in == "1x1" else (1, stride)
        branch = _apply_conv_norm(branch, width, 1, first, config, name=f"{name}_reduce")
        branch = _apply_conv_norm(branch, width, 3, second, config, name=f"{name}_conv")
        branch = _apply_conv_norm(branch, out, 1, 1, config, name=f"{name}_expand", last=True)
    else:
        branch = _apply_conv_norm(branch, width, 3, stride, config, name=f"{name}_conv1")
        branch = _apply_conv_norm(branch, out, 3, 1, config, name=f"{name}_conv2", last=True)
    if stride > 1 or x.shape[-1] != out:
        x = _apply_conv_norm(x, out, 1, stride, config, name=f"{name}_project", relu=False)
    return layers.ReLU(name=f"{name}_relu")(Sum(name=f"{name}_add")([x, branch]))


def _apply_conv_norm(
    x: Tensor,
    filters: int,
    kernel: int,
    stride: int,
    config: "ResNet",
    name: str,
    padding: str = "same",
    relu: bool = True,
    last: bool = False,
) -> Any:
    """Applies a convolution without bias, its norm, and a ReLU unless a `Sum` follows.

    Returns:
        A tensor; or, at the end of a branch or shortcut, an input of `Sum`.
    """
    if stride > 1 and kernel > 1 and padding == "same":
        # "same" pads asymmetrically at stride 2, but published weights expect symmetric padding.
        x = layers.ZeroPadding2D(kernel // 2, CHANNELS_LAST, name=f"{name}_pad")(x)
        padding = "valid"
    ends = last or not relu  # a `Sum` is the next layer
    pointwise = ends and _is_pointwise(x, filters, kernel, config)
    x = (PointwiseConv if pointwise else Conv2D)(
        filters,
        kernel,
        strides=stride,
        padding=padding,
        use_bias=False,
        kernel_initializer=_make_he_normal(),
        name=f"{name}_conv",
    )(x)
    # A residual branch that starts at zero trains with large batches (Goyal et al. 2017).
    x = (PointwiseNormalization if pointwise else GhostBatchNormalization)(
        config.norm_batch, gamma_initializer="zeros" if last else "ones", name=f"{name}_norm"
    )(x)
    return x if ends else layers.ReLU(name=f"{name}_act")(x)


def _make_he_normal() -> Initializer:
    return keras.initializers.VarianceScaling(2.0, "fan_out")


def _is_pointwise(x: Tensor, filters: int, kernel: int, config: "ResNet") -> bool:
    """Returns whether `PointwiseConv` should be faster than `Conv2D` for this convolution."""
    expands = kernel == 1 and x.shape[-1] <= min(filters // 2, MOST_CHANNELS)
    return expands and isinstance(config.norm_batch, int) and config.norm_batch >= LARGE_GROUP


@keras.saving.register_keras_serializable("tftpu")
class NormWithin(GhostBatchNormalization):
    """Batch normalisation of the inside of images, whose border becomes minus infinity.

    Args:
        norm_batch: see `GhostBatchNormalization`.
        border: numbers of rows and columns before and after the inside. Statistics ignore the
            border, and a max pool after this layer never selects it.
    """

    def __init__(self, norm_batch: int | str, border: tuple[int, int], **kwargs: Any):
        super().__init__(norm_batch, **kwargs)
        self.border = tuple(border)

    def call(self, x: Tensor, training: bool | None = False) -> Tensor:
        rows, columns = (self._mark_inside(size) for size in x.shape[1:3])
        inside = ops.logical_and(rows[:, None, None], columns[:, None])
        x = super().call(ops.where(inside, x, ops.cast(0, x.dtype)), training=training)
        return x + ops.cast(ops.where(inside, 0.0, float("-inf")), x.dtype)

    def _mark_inside(self, size: int) -> Tensor:
        place = ops.arange(size)
        return ops.logical_and(place >= self.border[0], place < size - self.border[1])

    def _compute_statistics(self, x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        # Mean and variance include the zeros of the border; the lines below correct for them.
        mean, variance = super()._compute_statistics(x, axes)
        height, width = x.shape[-3:-1]
        more = height * width / ((height - sum(self.border)) * (width - sum(self.border)))
        square = more * (variance + ops.square(mean))
        return more * mean, ops.maximum(square - ops.square(more * mean), 0.0)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "border": self.border}


@keras.saving.register_keras_serializable("tftpu")
class SpaceToDepthStem(layers.Layer):
    """The 7x7 convolution of stride 2, computed as a 4x4 one over blocks of 2x2 pixels.

    Results and weights are the same. Three channels fill 3 of a TPU's 128 lanes, twelve fill 12
    (Ying et al. 2018, https://arxiv.org/abs/1811.06992).

    Args:
        filters: channels of the output.
        border: numbers of rows and columns that the output has before and after the result of a
            convolution with zero padding, (batch, height / 2, width / 2, filters).
    """

    def __init__(self, filters: int, border: tuple[int, int] = (0, 0), **kwargs: Any):
        super().__init__(**kwargs)
        self.filters = filters
        self.border = tuple(border)

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight(
            shape=(7, 7, input_shape[-1], self.filters),
            initializer=_make_he_normal(),
            name="kernel",
        )

    def call(self, x: Tensor) -> Tensor:
        batch, (height, width, channels) = ops.shape(x)[0], x.shape[1:]
        x = ops.reshape(x, (batch, height // 2, 2, width // 2, 2, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        x = ops.reshape(x, (batch, height // 2, width // 2, 4 * channels))
        # A zero before the first row and column makes the kernel 8x8; its window then covers pixels
        # 2 i - 4 to 2 i + 3.
        kernel = ops.pad(self.kernel, ((1, 0), (1, 0), (0, 0), (0, 0)))
        kernel = ops.reshape(kernel, (4, 2, 4, 2, channels, self.filters))
        kernel = ops.transpose(kernel, (0, 2, 1, 3, 4, 5))
        kernel = ops.reshape(kernel, (4, 4, 4 * channels, self.filters))
        zeros = (2 + self.border[0], 1 + self.border[1])
        x = ops.pad(x, ((0, 0), zeros, zeros, (0, 0)))
        return ops.conv(x, kernel, padding="valid", data_format=CHANNELS_LAST)

    def compute_output_shape(self, input_shape: Any) -> Any:
        batch, height, width, _ = input_shape
        more = sum(self.border)
        return (batch, height // 2 + more, width // 2 + more, self.filters)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "filters": self.filters, "border": self.border}
