"""ConvNeXt: Liu et al. 2022 (https://arxiv.org/abs/2201.03545)."""

import keras
from keras import layers

from tftpu.models.layers.gelu import gelu
from tftpu.models.layers.remat import BlockModel
from tftpu.models.layers.stochastic_depth import StochasticDepth
from tftpu.models.sizes import ConvNeXt


def build(config: ConvNeXt) -> keras.Model:
    """A classifier: images (batch, size, size, channels), float -> logits (batch, classes)."""
    images = keras.Input((config.image_size, config.image_size, config.channels), name="image")
    x = _conv(images, config.widths[0], 4, name="stem_conv")  # a quarter of the size
    x = _norm(x, name="stem_norm")
    done, last = 0, sum(config.blocks) - 1
    borders = [x]
    for stage, (blocks, width) in enumerate(zip(config.blocks, config.widths), 1):
        if stage > 1:
            x = _norm(x, name=f"stage{stage}_norm")
            x = _conv(x, width, 2, name=f"stage{stage}_conv")
        for block in range(1, blocks + 1):
            # The deeper the block, the more often it is dropped.
            drop = config.stochastic_depth * done / last if last else 0.0
            x = _block(x, width, drop, config, name=f"stage{stage}_block{block}")
            borders.append(x)
            done += 1
    x = layers.GlobalAveragePooling2D(name="pool")(x)  # (batch, channels)
    x = _norm(x, name="head_norm")
    # float32 logits: the softmax of a bfloat16 one loses too much.
    head = layers.Dense(
        config.num_classes, kernel_initializer=_init(), dtype="float32", name="head"
    )
    model = BlockModel(images, head(x), name=config.name)
    return model.with_remat(config.remat, borders)


def _block(x, width: int, drop: float, config: ConvNeXt, name: str):
    y = layers.DepthwiseConv2D(
        7, padding="same", depthwise_initializer=_init(), name=f"{name}_depthwise"
    )(x)
    y = _norm(y, name=f"{name}_norm")
    y = layers.Dense(4 * width, kernel_initializer=_init(), name=f"{name}_expand")(y)
    y = layers.Activation(gelu, name=f"{name}_gelu")(y)
    y = layers.Dense(width, kernel_initializer=_init(), name=f"{name}_contract")(y)
    if config.layer_scale:
        y = LayerScale(config.layer_scale, name=f"{name}_layer_scale")(y)
    if drop:
        y = StochasticDepth(drop, name=f"{name}_drop")(y)
    return layers.Add(name=f"{name}_add")([x, y])


class LayerScale(layers.Layer):
    """A learned factor a channel, small at first (Touvron et al. 2021).

    Follows https://arxiv.org/abs/2103.17239.
    """

    def __init__(self, initial: float, **kwargs):
        super().__init__(**kwargs)
        self.initial = initial

    def build(self, input_shape):
        self.scale = self.add_weight(
            shape=(input_shape[-1],),
            initializer=keras.initializers.Constant(self.initial),
            name="scale",
        )

    def call(self, x):
        return x * self.scale

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "initial": self.initial}


def _conv(x, filters: int, patch: int, name: str):
    """A convolution of patches that do not overlap."""
    return layers.Conv2D(filters, patch, strides=patch, kernel_initializer=_init(), name=name)(x)


def _norm(x, name: str):
    return layers.LayerNormalization(epsilon=1e-6, name=name)(x)


def _init():
    return keras.initializers.TruncatedNormal(stddev=0.02)
