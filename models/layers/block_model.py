"""Functional models made of blocks, which the backward pass may recompute instead of keeping."""

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tftpu.config import Model
from tftpu.models import checks
from tftpu.tensors import Tensor

SIZES = "tftpu.models.sizes"  # where the zoo's configs are; it imports this module to build them


class BlockModel(keras.Model):
    """A functional model with its hyper-parameters and the borders of its blocks.

    Layers, variables and numbers do not depend on `remat`. A model loaded from a `.keras` file has
    its hyper-parameters, and keeps all activations.

    Args:
        inputs: the inputs of the model, as for `keras.Model`.
        outputs: the outputs, as for `keras.Model`.
        name: of the model.
        hyperparameters: the config that the model was built from. `tftpu.models.load_weights` finds
            the layout of a weight file by it. None for a model that is not in the zoo.
        remat: "none" keeps all activations for the backward pass; "block" keeps only the input of
            each block, for about a third more arithmetic (Chen et al. 2016,
            https://arxiv.org/abs/1604.06174).
        borders: the tensor before the first block, and the output of each block.
        shared: inputs of the model that every block takes too, int32.

    Raises:
        UserError: an unknown `remat`.
    """

    def __init__(
        self,
        inputs: Any,
        outputs: Any,
        name: str | None = None,
        *,
        hyperparameters: Model | Mapping[str, Any] | None = None,
        remat: str = "none",
        borders: Sequence[keras.KerasTensor] = (),
        shared: Sequence[keras.KerasTensor] = (),
        **kwargs: Any,
    ):
        checks.remat(remat)
        super().__init__(inputs, outputs, name=name, **kwargs)
        if isinstance(hyperparameters, Mapping):  # from a `.keras` file
            hyperparameters = _decoded(hyperparameters)
        self.hyperparameters: Model | None = hyperparameters
        self._blocks = Blocks.between(inputs, borders, shared) if remat == "block" else None
        self._end = Part(keras.Model(borders[-1], outputs)) if self._blocks else None

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Tensor:
        if not training or self._blocks is None or self._end is None:
            return super().call(inputs, training=training, mask=mask)
        return self._end.model(self._blocks.run(inputs), training=True)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        if self.hyperparameters is not None:
            config["hyperparameters"] = _encoded(self.hyperparameters)
        return config


@dataclasses.dataclass(frozen=True)
class Part:
    """A model over some layers of another one.

    Wrapped, because Keras would make a model that is an attribute a layer of the outer model.
    """

    model: keras.Model


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The layers of a model up to the end of its last block."""

    first: keras.Model  # everything before the first block
    blocks: tuple[keras.Model, ...]
    shared: tuple[str, ...]  # names of the inputs that every block takes too

    @classmethod
    def between(
        cls,
        inputs: Any,
        borders: Sequence[keras.KerasTensor],
        shared: Sequence[keras.KerasTensor],
    ) -> "Blocks":
        """Cuts a model at `borders`; arguments as for `BlockModel`."""
        return cls(
            keras.Model(inputs, borders[0]),
            tuple(keras.Model([x, *shared], y) for x, y in itertools.pairwise(borders)),
            tuple(known.name for known in shared),
        )

    def run(self, inputs: Any) -> Tensor:
        """Returns the output of the last block in training, keeping only the blocks' inputs."""
        from tftpu.models.kernels.recompute import recomputed

        given = [inputs[name] for name in self.shared]
        given = [None if x is None else keras.ops.convert_to_tensor(x, "int32") for x in given]
        x = self.first(inputs, training=True)
        for block in self.blocks:
            x = recomputed(functools.partial(_run, block, given), block.variables, x)
        return x


def _run(block: keras.Model, given: list[Tensor | None], x: Tensor) -> Tensor:
    return block([x, *given], training=True)


def _encoded(config: Model) -> dict[str, Any]:
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {
        "class": f"{type(config).__module__}.{type(config).__qualname__}",
        "fields": {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()},
    }


def _decoded(encoded: Mapping[str, Any]) -> Model | None:
    """Reads the output of `_encoded`; returns None for a class that does not exist."""
    module, _, name = encoded["class"].rpartition(".")
    if module != SIZES:
        return None  # a file must not choose which modules are imported
    cls = getattr(importlib.import_module(SIZES), name, None)
    if cls is None:
        return None
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in encoded["fields"].items()})
