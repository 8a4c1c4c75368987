"""The head of a language model: logits over a vocabulary."""

from typing import Any

import keras
from keras import layers

from tftpu.tensors import Tensor, ops


class TiedHead(layers.Layer):
    """Logits by the transposed matrix of the token embedding, in float32 (Press & Wolf 2016).

    Follows https://arxiv.org/abs/1608.05859.

    Args:
        embedding: the layer whose matrix, (vocabulary, width), is shared.
    """

    def __init__(self, embedding: layers.Embedding, **kwargs: Any):
        # The hidden states stay in their compute dtype, which a loss by chunks needs.
        super().__init__(autocast=False, **kwargs)
        self.embedding = embedding

    def call(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to float32 logits, (batch, time, vocabulary)."""
        return vocabulary_logits(x, self.matrix())

    def matrix(self) -> Tensor:
        """Returns the shared matrix, (vocabulary, width)."""
        return ops.convert_to_tensor(self.embedding.embeddings)

    def get_config(self) -> dict[str, Any]:
        embedding = keras.saving.serialize_keras_object(self.embedding)
        return {**super().get_config(), "embedding": embedding}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TiedHead":
        config["embedding"] = keras.saving.deserialize_keras_object(config["embedding"])
        return cls(**config)


def vocabulary_logits(x: Tensor, matrix: Tensor) -> Tensor:
    """Returns `x @ matrix.T` in float32, of factors rounded to x's dtype.

    Args:
        x: (batch, time, width), in the compute dtype.
        matrix: (vocabulary, width).

    Returns:
        (batch, time, vocabulary), float32.
    """
    rounded = ops.cast(ops.cast(matrix, x.dtype), "float32")
    return ops.matmul(ops.cast(x, "float32"), ops.transpose(rounded))
