"""ResNet v1.5: He et al. 2015 (https://arxiv.org/abs/1512.03385), the stride in the 3x3."""

import keras
from keras import layers, ops

from tftpu.models.layers.normalization import GhostBatchNormalization
from tftpu.models.layers.pointwise import PointwiseConv, normalized
from tftpu.models.layers.remat import BlockModel
from tftpu.models.sizes import ResNet

# Where `PointwiseConv` gains on a TPU. Examples that share batch statistics: with 32 of the 128 of
# a core it took as long; with 64 and 128 the step has a seventh and a fifth fewer cycles than with
# 32 (compiled, v5e). No question of the groups in hand, so that any number of replicas does the
# same.
LARGE_GROUP = 64
MOST_CHANNELS = 512  # of its input: those of 1,024 cost more than their product's reads


def build(config: ResNet) -> keras.Model:
    """A classifier: images (batch, size, size, channels), float -> logits (batch, classes)."""
    images = keras.Input((config.image_size, config.image_size, config.channels), name="image")
    x = _stem(images, config)
    borders = [x]
    for stage, blocks in enumerate(config.blocks):
        width = config.width * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _residual(x, width, stride, config, name=f"stage{stage + 1}_block{block + 1}")
            borders.append(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)  # (batch, channels)
    if config.dropout:
        x = layers.Dropout(config.dropout, name="dropout")(x)
    # float32 logits: the softmax of a bfloat16 one loses too much.
    logits = layers.Dense(config.num_classes, dtype="float32", name="head")(x)
    model = BlockModel(images, logits, name=config.name)
    return model.with_remat(config.remat, borders)


def _stem(x, config: ResNet):
    if config.stem == "small":
        return _conv_norm(x, config.width, 3, 1, config, name="stem")
    # The pool's windows begin one pixel before the image. To pad its input would be to copy it, 3 %
    # of the cycles of a ResNet-50 (compiled, v5e); so the convolution makes those pixels as well.
    inside = (config.image_size + 1) // 2
    outside = (1, inside % 2)
    if config.stem == "space_to_depth":
        x = SpaceToDepthStem(config.width, outside, name="stem_conv")(x)
    else:
        end = 2 * (inside + outside[1]) + 3 - config.image_size
        x = layers.ZeroPadding2D(((5, end), (5, end)), name="stem_pad")(x)
        x = layers.Conv2D(
            *(config.width, 7, 2),
            use_bias=False,
            kernel_initializer=_he_normal(),
            name="stem_conv",
        )(x)
    x = NormWithin(config.norm_batch, border=outside, name="stem_norm")(x)
    x = layers.MaxPooling2D(3, strides=2, name="stem_pool")(x)
    return layers.ReLU(name="stem_act")(x)  # as before the pool, of a quarter of the elements


def _residual(x, width: int, stride: int, config: ResNet, name: str):
    out = 4 * width if config.bottleneck else width
    branch = x
    if config.bottleneck:
        first, second = (stride, 1) if config.stride_in == "1x1" else (1, stride)
        branch = _conv_norm(branch, width, 1, first, config, name=f"{name}_reduce")
        branch = _conv_norm(branch, width, 3, second, config, name=f"{name}_conv")
        branch = _conv_norm(branch, out, 1, 1, config, name=f"{name}_expand", last=True)
    else:
        branch = _conv_norm(branch, width, 3, stride, config, name=f"{name}_conv1")
        branch = _conv_norm(branch, out, 3, 1, config, name=f"{name}_conv2", last=True)
    if stride > 1 or x.shape[-1] != out:
        x = _conv_norm(x, out, 1, stride, config, name=f"{name}_project", relu=False)
    return layers.ReLU(name=f"{name}_relu")(Sum(name=f"{name}_add")([x, branch]))


def _conv_norm(
    x,
    filters: int,
    kernel: int,
    stride: int,
    config: ResNet,
    name: str,
    padding: str = "same",
    relu: bool = True,
    last: bool = False,
):
    """A convolution without bias, its norm, and a ReLU unless it ends a residual branch."""
    if stride > 1 and kernel > 1 and padding == "same":
        # "same" pads asymmetrically at stride 2; the paper's weights expect the symmetric padding.
        x = layers.ZeroPadding2D(kernel // 2, name=f"{name}_pad")(x)
        padding = "valid"
    x = _conv_class(x, filters, kernel, stride, config)(
        filters,
        kernel,
        strides=stride,
        padding=padding,
        use_bias=False,
        kernel_initializer=_he_normal(),
        name=f"{name}_conv",
    )(x)
    return _norm(x, config, name, relu, last)


def _he_normal() -> keras.initializers.Initializer:
    return keras.initializers.VarianceScaling(2.0, "fan_out")


def _conv_class(x, filters: int, kernel: int, stride: int, config: ResNet) -> type:
    expands = kernel == 1 and x.shape[-1] <= min(filters // 2, MOST_CHANNELS)
    large = config.norm_batch != "global" and config.norm_batch >= LARGE_GROUP
    return PointwiseConv if expands and large else layers.Conv2D


def _norm(x, config: ResNet, name: str, relu: bool = True, last: bool = False):
    # A residual branch that starts at zero (Goyal et al. 2017) trains at large batches.
    x = GhostBatchNormalization(
        config.norm_batch, gamma_initializer="zeros" if last else "ones", name=f"{name}_norm"
    )(x)
    return layers.ReLU(name=f"{name}_act")(x) if relu and not last else x


class Sum(layers.Add):
    """A sum; of two outputs of `PointwiseConv` and norm it is worked out at once."""

    def call(self, inputs):
        terms = [getattr(x, "tftpu_term", None) for x in inputs]
        return super().call(inputs) if None in terms else normalized(*terms)


class NormWithin(GhostBatchNormalization):
    """Batch normalisation of the inside of images, with a border that no maximum sees.

    Args:
        norm_batch: as of `GhostBatchNormalization`.
        border: rows and columns before and after the inside. What is there is not read, and is
            the lowest number of the result.
    """

    def __init__(self, norm_batch: int | str, border: tuple[int, int], **kwargs):
        super().__init__(norm_batch, **kwargs)
        self.border = tuple(border)

    def call(self, x, training=False):
        rows, columns = (self._inside(size) for size in x.shape[1:3])
        inside = ops.logical_and(rows[:, None, None], columns[:, None])
        x = super().call(ops.where(inside, x, ops.cast(0, x.dtype)), training=training)
        return x + ops.cast(ops.where(inside, 0.0, float("-inf")), x.dtype)

    def _inside(self, size: int):
        place = ops.arange(size)
        return ops.logical_and(place >= self.border[0], place < size - self.border[1])

    def _statistics(self, x, axes: tuple[int, ...]):
        mean, variance = super()._statistics(x, axes)  # with the zeros of the border
        height, width = x.shape[-3:-1]
        more = height * width / ((height - sum(self.border)) * (width - sum(self.border)))
        square = more * (variance + ops.square(mean))
        return more * mean, ops.maximum(square - ops.square(more * mean), 0.0)

    def get_config(self):
        return {**super().get_config(), "border": self.border}


class SpaceToDepthStem(layers.Layer):
    """The 7x7 convolution of stride 2, worked out as a 4x4 one over blocks of 2x2 pixels.

    The same numbers and the same weights. Three channels fill 3 of a TPU's 128 lanes, twelve 12
    (Ying et al. 2018, https://arxiv.org/abs/1811.06992).

    Args:
        filters: channels of the output.
        border: rows and columns of it before and after those of the convolution with zeros round
            the image, (batch, height / 2, width / 2, filters).
    """

    def __init__(self, filters: int, border: tuple[int, int] = (0, 0), **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.border = tuple(border)

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(7, 7, input_shape[-1], self.filters),
            initializer=_he_normal(),
            name="kernel",
        )

    def call(self, x):
        batch, (height, width, channels) = ops.shape(x)[0], x.shape[1:]
        x = ops.reshape(x, (batch, height // 2, 2, width // 2, 2, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        x = ops.reshape(x, (batch, height // 2, width // 2, 4 * channels))
        # A zero before the first row and column: 8x8, the window from pixel 2 i - 4 to 2 i + 3.
        kernel = ops.pad(self.kernel, ((1, 0), (1, 0), (0, 0), (0, 0)))
        kernel = ops.reshape(kernel, (4, 2, 4, 2, channels, self.filters))
        kernel = ops.transpose(kernel, (0, 2, 1, 3, 4, 5))
        kernel = ops.reshape(kernel, (4, 4, 4 * channels, self.filters))
        zeros = (2 + self.border[0], 1 + self.border[1])
        x = ops.pad(x, ((0, 0), zeros, zeros, (0, 0)))
        return ops.conv(x, kernel, padding="valid", data_format="channels_last")

    def compute_output_shape(self, input_shape):
        batch, height, width, _ = input_shape
        more = sum(self.border)
        return (batch, height // 2 + more, width // 2 + more, self.filters)

    def get_config(self):
        return {**super().get_config(), "filters": self.filters, "border": self.border}
