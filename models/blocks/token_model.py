"""Transformers over tokens: plain token ids, or rows that hold several documents."""

from typing import Any

import keras

from tftpu.errors import UserError, did_you_mean
from tftpu.models.blocks.block_model import BlockModel, SubModel
from tftpu.models.layers.heads import Tied, TiedHead, UntiedHead, compute_vocabulary_logits
from tftpu.tensors import Tensor

TOKENS = "tokens"  # the only feature that every model needs
HEAD = "head"  # the name of the last layer of every model of the zoo


@keras.saving.register_keras_serializable("tftpu")
class TokenModel(BlockModel):
    """A functional model of tokens that also takes rows packed with several documents.

    Its features are token ids, (batch, time) int32, or a dict of them under "tokens" and of any of
    the following, each (batch, time) int32:

    - "segments": the number of the document that a token belongs to; attention stays within it.
      Padding is a separate document, by convention 0.
    - "positions": the position of a token in its document; by default, its position in the row.

    Args: as for `BlockModel`.
    """

    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **kwargs: Any):
        super().__init__(inputs, outputs, name, **kwargs)
        # Keras's clone makes every input required and gives the head a separate matrix.
        for layer in self.layers:
            if isinstance(layer, keras.layers.InputLayer):
                layer.optional = layer.name != TOKENS
            if isinstance(layer, Tied):
                layer.share(self.get_layer(layer.embedding.name))

    def __call__(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; raises `UserError` for a feature that the model does not have."""
        return super().__call__(self._complete_features(features), *args, **kwargs)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Tensor:
        # Keras's JAX trainer uses `stateless_call`, which does not go through `__call__`.
        return super().call(self._complete_features(inputs), training=training, mask=mask)

    def _complete_features(self, features: Any) -> dict[str, Tensor | None]:
        """Returns all features by name, with None for missing ones."""
        if not isinstance(features, dict):
            features = {TOKENS: features}
        for name in features:
            if name not in self.input:
                raise UserError(
                    f"The model {self.name!r} has no feature {name!r}."
                    f"{did_you_mean(name, self.input)}"
                )
        return {**dict.fromkeys(self.input), **features}


@keras.saving.register_keras_serializable("tftpu")
class FactoredTokenModel(TokenModel):
    """A `TokenModel` whose logits are the hidden states times the matrix of its head.

    Args: as for `BlockModel`.
    """

    def __init__(
        self,
        inputs: Any,
        outputs: Any,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(inputs, outputs, name, **kwargs)
        factored = [outputs, self._head.input]
        self._factored = SubModel(keras.Model(inputs, factored, name=name))
        self._factored_end = None
        if self._blocks is not None:
            self._factored_end = SubModel(keras.Model(self._blocks.border, factored))

    def factored_logits(
        self, x: Any, training: bool | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the logits together with their factors.

        From the factors, `tftpu.optim.chunked.chunked_crossentropy` computes a loss in chunks. If
        nothing else, such as a metric, reads the logits, the compiler omits their product.

        Args:
            x: features, as the model itself takes them.
            training: whether this is a training step.

        Returns:
            logits: (batch, time, vocabulary), float32: the output of the model.
            hidden: (batch, time, width), in the compute dtype.
            matrix: (vocabulary, width), in the dtype of the weights.
        """
        features = self._complete_features(x)
        blocks, end = self._blocks, self._factored_end
        if blocks is not None and end is not None and blocks.serve(training):
            with keras.name_scope(self.name):
                hidden = blocks.run(features, bool(training))
                logits, hidden = end.model(hidden, training=training)
        else:
            logits, hidden = self._factored.model(features, training=training)
        return logits, hidden, self._head.read_matrix()

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Returns the logits, (batch, time, vocabulary), of hidden states of `factored_logits`."""
        return compute_vocabulary_logits(hidden, self._head.read_matrix())

    @property
    def _head(self) -> TiedHead | UntiedHead:
        head = self.get_layer(HEAD)
        if not isinstance(head, TiedHead | UntiedHead):
            raise TypeError(f"The layer {HEAD!r} is a {type(head).__name__}, which has no matrix.")
        return head


def build_token_inputs(*more: str) -> dict[str, keras.KerasTensor]:
    """Returns the inputs of a `TokenModel`: "tokens", "segments", "positions", and `more`.

    All but the tokens are optional.
    """

    def build_input(name: str) -> Any:
        return keras.Input((None,), dtype="int32", name=name, optional=name != TOKENS)

    return {name: build_input(name) for name in (TOKENS, "segments", "positions", *more)}
