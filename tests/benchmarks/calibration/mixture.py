"""A decoder with a mixture of experts, as Mixtral (Jiang et al. 2024, arXiv:2401.04088) has it.

Each expert takes a limited number of an example's tokens (Lepikhin et al. 2020, arXiv:2006.16668):
two products with masks carry tokens to their experts and back, and a token that finds an expert
full passes it by. That is how its published training steps with dropped tokens compute it.
"""

import math
from typing import Any

import keras
from keras import layers

from tftpu.models.families.llama import RotaryAttention
from tftpu.tensors import ops

_CHOSEN = 2  # experts of a token


class Experts(layers.Layer):
    """Experts with gates, of which each token takes two.

    Args:
        experts: their number.
        hidden: channels between their two products.
        spare: capacity of an expert, relative to its share of the tokens.
        kwargs: as for any layer.
    """

    def __init__(self, experts: int, hidden: int, spare: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.experts, self.hidden, self.spare = experts, hidden, spare
        self.router = layers.Dense(experts, use_bias=False, dtype="float32")

    def build(self, input_shape: Any) -> None:
        width = input_shape[-1]
        self.router.build(input_shape)
        self.gate = self.add_weight((self.experts, width, self.hidden), name="gate")
        self.expand = self.add_weight((self.experts, width, self.hidden), name="expand")
        self.contract = self.add_weight((self.experts, self.hidden, width), name="contract")

    def call(self, x: Any) -> Any:
        shares, chosen = self._choose(x)
        slots = ops.cast(
            self._assign(chosen, x.shape[1]), x.dtype
        )  # (batch, time, chosen, experts, slots)
        sent = ops.sum(slots, axis=2)
        weighted = ops.sum(slots * ops.cast(shares, slots.dtype)[..., None, None], axis=2)
        taken = ops.einsum("bsm,bsec->ebcm", x, sent)
        hidden = ops.silu(ops.einsum("ebcm,emh->ebch", taken, self.gate))
        hidden = hidden * ops.einsum("ebcm,emh->ebch", taken, self.expand)
        found = ops.einsum("ebch,ehm->ebcm", hidden, self.contract)
        return ops.einsum("ebcm,bsec->bsm", found, weighted)

    def _choose(self, x: Any) -> tuple[Any, Any]:
        """Returns the shares of a token's experts, (batch, time, chosen), and which they are."""
        scores, chosen = ops.top_k(self.router(x), _CHOSEN)
        return ops.softmax(scores, axis=-1), chosen

    def _assign(self, chosen: Any, time: int) -> Any:
        """Returns the slot of each token at each of its experts as a mask; none if it is full."""
        capacity = math.ceil(time * _CHOSEN / self.experts * self.spare)
        to_expert = ops.one_hot(chosen, self.experts, dtype="int32")
        flat = ops.reshape(to_expert, (-1, time * _CHOSEN, self.experts))
        place = ops.reshape(ops.cumsum(flat, axis=1) * flat, (-1, time, _CHOSEN, self.experts))
        return ops.one_hot(place - 1, capacity, dtype="int8")  # -1 and full ones are zero


class Block(layers.Layer):
    """A block of a decoder whose dense layers are experts.

    Args:
        sizes: those of `build_mixtral`.
        kwargs: as for any layer.
    """

    def __init__(self, sizes: dict[str, int], **kwargs: Any):
        super().__init__(**kwargs)
        self.norm1, self.norm2 = layers.RMSNormalization(), layers.RMSNormalization()
        self.attention = RotaryAttention(
            sizes["heads"], sizes["kv_heads"], base=1e6, implementation="flash"
        )
        self.experts = Experts(sizes["experts"], sizes["hidden"], spare=1.25)

    def build(self, input_shape: Any) -> None:
        for layer in (self.norm1, self.norm2, self.attention, self.experts):
            layer.build(input_shape)

    def call(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


def build_mixtral(tokens: int, vocabulary: int, width: int, **sizes: int) -> keras.Model:
    """Returns a decoder from ids of tokens to logits.

    Args:
        tokens: of an example.
        vocabulary: number of tokens that there are.
        width: channels between blocks.
        sizes: layers, heads, kv_heads, experts and hidden.
    """
    ids = keras.Input((tokens,), dtype="int32", name="tokens")
    x = layers.Embedding(vocabulary, width)(ids)
    for number in range(sizes["layers"]):
        x = Block(sizes, name=f"block{number + 1}")(x)
    x = layers.RMSNormalization()(x)
    return keras.Model(ids, layers.Dense(vocabulary, use_bias=False, dtype="float32")(x))
