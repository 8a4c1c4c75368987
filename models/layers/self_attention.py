"""Multi-head self-attention with biases, as ViT and BERT have it."""

import keras
from keras import layers, ops

from tftpu.models.layers.attention import attention_by_heads, whole_sequences


class SelfAttention(layers.Layer):
    """Each token of (batch, time, width) gathers from all, or from all of its segment.

    Args:
        heads: width is a multiple of it.
        implementation: of `tftpu.models.layers.attention.attention`.
    """

    def __init__(self, heads: int, implementation: str = "plain", **kwargs):
        super().__init__(**kwargs)
        self.heads = heads
        self.implementation = implementation

    def build(self, x_shape, segments_shape=None):
        width = x_shape[-1]
        normal = keras.initializers.TruncatedNormal(stddev=0.02)

        def dense(units, name):
            layer = layers.Dense(
                units, kernel_initializer=normal.clone(), dtype=self.dtype_policy, name=name
            )
            layer.build(x_shape)
            return layer

        self.qkv = dense(3 * width, "qkv")
        self.out = dense(width, "out")

    def call(self, x, segments=None):
        whole = whole_sequences(self.implementation, x, self.heads)
        if whole:
            product = ops.matmul(x, self.qkv.kernel)
            return self.out(whole(product, self.qkv.bias, self.heads, segments))
        # Products write and read head after head: cutting a width into heads would cost a TPU a
        # copy of each array, and so would cutting one product into three.
        width = x.shape[-1]
        head = (self.heads, width // self.heads)
        kernel = ops.reshape(self.qkv.kernel, (width, 3, *head))
        bias = ops.reshape(self.qkv.bias, (3, head[0], 1, head[1]))
        parts = (ops.einsum("btc,chd->bhtd", x, kernel[:, i]) + bias[i] for i in range(3))
        y = attention_by_heads(*parts, segment_ids=segments, implementation=self.implementation)
        kernel = ops.reshape(self.out.kernel, (*head, width))
        return ops.einsum("bhtd,hdc->btc", y, kernel) + self.out.bias

    def compute_output_shape(self, x_shape, segments_shape=None):
        return x_shape

    def get_config(self):
        own = {"heads": self.heads, "implementation": self.implementation}
        return {**super().get_config(), **own}
