"""Multi-head self-attention with biases, as in ViT and BERT."""

from typing import Any

import keras

from tftpu import sharding
from tftpu.kernels.attention import attention_by_heads, choose_whole_kernel
from tftpu.models.layers.dense import DenseContainer
from tftpu.models.layers.tensor_parallel import project_heads, split_biases
from tftpu.sharding import HEADS
from tftpu.tensors import Tensor, ops


@keras.saving.register_keras_serializable("tftpu")
class SelfAttention(DenseContainer):
    """Attention of each token of (batch, time, width) to all tokens of its row or segment.

    Args:
        heads: number of heads, a divisor of the width.
        implementation: see `tftpu.kernels.attention.attention`.
        kwargs: as for `DenseContainer`.
    """

    def __init__(self, heads: int, implementation: str = "plain", **kwargs: Any):
        super().__init__(**kwargs)
        self.heads = heads
        self.implementation = implementation

    # Keras passes the shapes by the names of the arguments of `call`.
    def build(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_shape: Any, segments_shape: Any = None
    ) -> None:
        width = x_shape[-1]
        normal = keras.initializers.TruncatedNormal(stddev=0.02)
        self.qkv = self.build_dense("qkv", 3 * width, x_shape, kernel_initializer=normal.clone())
        self.out = self.build_dense("out", width, x_shape, kernel_initializer=normal.clone())

    def call(self, x: Tensor, segments: Tensor | None = None) -> Tensor:
        whole = choose_whole_kernel(self.implementation, x, self.heads)
        if whole and not sharding.is_sharded(HEADS):
            return self.out(whole(self.qkv.compute_product(x), self.qkv.bias, self.heads, segments))
        # The products write and read (batch, heads, time, head_dim). On a TPU, splitting a width
        # into heads would copy each array, and so would splitting one product into three.
        width = x.shape[-1]
        head = (self.heads, width // self.heads)
        biases = split_biases(self.qkv.bias, self.heads)
        products = project_heads(self.qkv, x, self.heads, "btc,chd->bhtd")
        parts = (product + bias[:, None] for product, bias in zip(products, biases))
        y = attention_by_heads(*parts, segment_ids=segments, implementation=self.implementation)
        kernel = ops.reshape(self.out.compute_base(), (*head, width))
        product = ops.einsum("bhtd,hdc->btc", y, kernel)
        adapters = self.out.compute_low_rank()
        if adapters is not None:
            first = ops.reshape(adapters[0], (*head, -1))
            product = product + ops.matmul(ops.einsum("bhtd,hdr->btr", y, first), adapters[1])
        return product + self.out.bias

    def compute_output_shape(self, x_shape: Any, segments_shape: Any = None) -> Any:
        return x_shape

    def get_config(self) -> dict[str, Any]:
        own = {"heads": self.heads, "implementation": self.implementation}
        return {**super().get_config(), **own}
