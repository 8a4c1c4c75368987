"""What a transformer over tokens takes: plain token ids, or rows that hold several documents."""

import keras

from tftpu.errors import UserError, did_you_mean
from tftpu.models.layers.remat import BlockModel


class TokenModel(BlockModel):
    """A functional model of tokens that also takes rows packed from several documents.

    Its features are token ids (batch, time), int32, or a dict: "tokens", and as many as there are
    of the others, each (batch, time), int32. "segments": which document of its row a token belongs
    to; attention stays within it. Padding is a document of its own, 0 by custom. "positions": the
    place of a token in its document; left out, the place in the row.

    Raises:
        UserError: a feature that the model does not know.
    """

    def __call__(self, features, *args, **kwargs):
        if not isinstance(features, dict):
            features = {"tokens": features}
        for name in features:
            if name not in self.input:
                raise UserError(
                    f"The model {self.name!r} has no feature {name!r}."
                    f"{did_you_mean(name, self.input)}"
                )
        return super().__call__({**dict.fromkeys(self.input), **features}, *args, **kwargs)


def token_inputs(*more: str) -> dict[str, keras.KerasTensor]:
    """The inputs of a `TokenModel`: tokens, segments, positions, and more by name.

    Called on token ids alone, the others are None.
    """
    return {
        name: keras.Input((None,), dtype="int32", name=name, optional=name != "tokens")
        for name in ("tokens", "segments", "positions", *more)
    }
