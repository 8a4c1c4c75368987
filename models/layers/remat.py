"""Models whose blocks can be computed again in the backward pass, instead of being kept."""

import functools
import itertools
from typing import Any

import keras

from tftpu.models.sizes import check_remat


class BlockModel(keras.Model):
    """A functional model that may forget what its blocks compute, until the backward pass."""

    def with_remat(
        self, remat: str, borders: list[keras.KerasTensor], *shared: keras.KerasTensor
    ) -> "BlockModel":
        """The model itself, which keeps in training what `remat` says.

        Layers, variables and numbers do not depend on it.

        Args:
            remat: "none": keep all; "block": of each block its input alone, for about a third more
                arithmetic.
            borders: the tensor before the first block, and the one behind each.
            shared: inputs of the model that blocks take, too; int32.

        Raises:
            UserError: an unknown `remat`.
        """
        check_remat(remat)
        if remat == "block":
            first = keras.Model(self.input, borders[0])
            blocks = [keras.Model([x, *shared], y) for x, y in itertools.pairwise(borders)]
            last = keras.Model(borders[-1], self.output)
            # A function: models that are attributes would be layers of this one.
            self._parts = lambda: (first, blocks, last, shared)
        return self

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training or not hasattr(self, "_parts"):
            return super().call(inputs, training=training, mask=mask)
        from tftpu.models.kernels.recompute import recomputed

        first, blocks, last, shared = self._parts()
        given = [inputs[known.name] for known in shared]
        given = [None if x is None else keras.ops.convert_to_tensor(x, "int32") for x in given]
        x = first(inputs, training=True)
        for block in blocks:
            x = recomputed(functools.partial(_run, block, given), block.variables, x)
        return last(x, training=True)


def _run(block: keras.Model, given: list, x: Any) -> Any:
    return block([x, *given], training=True)
