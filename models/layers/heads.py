"""The head of a language model: logits over a vocabulary."""

import dataclasses
from typing import Any

import keras
from keras import layers

from tftpu.models.layers.dense import read_embeddings
from tftpu.tensors import Tensor, ops


class Tied(layers.Layer):
    """A layer that reads the matrix of the token embedding (Press & Wolf 2016).

    Follows https://arxiv.org/abs/1608.05859.

    Args:
        embedding: the layer whose matrix, (vocabulary, width), is shared. Its variables are not
            among this layer's.
    """

    def __init__(self, embedding: layers.Embedding, **kwargs: Any):
        super().__init__(**kwargs)
        self.share(embedding)

    def share(self, embedding: layers.Embedding) -> None:
        """Replaces the embedding whose matrix is read.

        Keras clones and loads layers one by one, each with its own embedding; the model's
        constructor then calls this to share one embedding again.
        """
        self._shared = _EmbeddingReference(embedding)

    @property
    def embedding(self) -> layers.Embedding:
        """The layer whose matrix is shared."""
        return self._shared.embedding

    def get_config(self) -> dict[str, Any]:
        embedding = keras.saving.serialize_keras_object(self.embedding)
        return {**super().get_config(), "embedding": embedding}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Tied":
        embedding = keras.saving.deserialize_keras_object(config["embedding"])
        return cls(**{**config, "embedding": embedding})


@dataclasses.dataclass(frozen=True)
class _EmbeddingReference:
    """A wrapper that hides the embedding of a `Tied` from Keras, which would track it there."""

    embedding: layers.Embedding


@keras.saving.register_keras_serializable("tftpu")
class TiedHead(Tied):
    """Logits as hidden states times the transposed token embedding, in float32.

    Args: as for `Tied`.
    """

    def __init__(self, embedding: layers.Embedding, **kwargs: Any):
        # Without autocast, hidden states keep their compute dtype, which a chunked loss needs.
        super().__init__(embedding, autocast=False, **kwargs)

    def call(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to float32 logits, (batch, time, vocabulary)."""
        return compute_vocabulary_logits(x, self.read_matrix())

    def read_matrix(self) -> Tensor:
        """Returns the shared matrix, (vocabulary, width)."""
        return read_embeddings(self.embedding)


@keras.saving.register_keras_serializable("tftpu")
class UntiedHead(layers.Dense):
    """Logits as hidden states times a separate matrix, in float32.

    Args: as for `keras.layers.Dense`; there is no bias.
    """

    def __init__(self, units: int, **kwargs: Any):
        options: dict[str, Any] = {**kwargs, "use_bias": False, "autocast": False}
        super().__init__(units, **options)  # autocast is off for the reason given in `TiedHead`

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Maps (batch, time, width) to float32 logits, (batch, time, vocabulary)."""
        return compute_vocabulary_logits(inputs, self.read_matrix())

    def read_matrix(self) -> Tensor:
        """Returns the transposed kernel, (vocabulary, width)."""
        return ops.transpose(self.kernel)


def compute_vocabulary_logits(x: Tensor, matrix: Tensor) -> Tensor:
    """Returns `x @ matrix.T` in float32, of factors rounded to x's dtype.

    Args:
        x: (batch, time, width), in the compute dtype.
        matrix: (vocabulary, width).

    Returns:
        (batch, time, vocabulary), float32.
    """
    rounded = ops.cast(ops.cast(matrix, x.dtype), "float32")
    return ops.matmul(ops.cast(x, "float32"), ops.transpose(rounded))
