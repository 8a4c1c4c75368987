"""Functional models made of blocks, whose activations the backward pass may recompute."""

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tftpu.blocks import JAX_REMATS, scanned
from tftpu.blocks.recompute import run_recomputed
from tftpu.config import ModelConfig
from tftpu.errors import UserError
from tftpu.inference.cache import find_open_cache
from tftpu.models import checks
from tftpu.models.layers.tensor_parallel import Rule, select_rules
from tftpu.tensors import Tensor

SIZES = "tftpu.models.sizes"  # the module of the zoo's configs, imported when one is decoded


@keras.saving.register_keras_serializable("tftpu")
class BlockModel(keras.Model):
    """A functional model whose layer `Structure` holds its hyper-parameters and blocks.

    With `remat="block"` the backward pass recomputes each block from its input. On the JAX engine,
    "attention" also keeps the outputs of attention kernels, "products" those and the products with
    weights, and "offload" keeps the inputs of blocks in the host's memory.
    Layers, variables and results do not depend on `remat` and `scan`. A model loaded from a
    `.keras` file, and a copy by `keras.models.clone_model`, run in the same way as the original.

    Args:
        inputs: the inputs of the model, as for `keras.Model`.
        outputs: the outputs, as for `keras.Model`, computed by way of a `Structure` or of another
            `BlockModel`.
        name: the name of the model.
    """

    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **kwargs: Any):
        # Built before the model, because new blocks make Keras renumber the nodes of the inputs.
        blocks = Blocks.from_tensors(inputs, outputs)
        super().__init__(inputs, outputs, name=name, **kwargs)
        self._blocks = blocks

    @property
    def hyperparameters(self) -> ModelConfig | None:
        """The config of the model, or of the model inside it; None if neither has one."""
        kinds = Structure | BlockModel
        found = (layer.hyperparameters for layer in self.layers if isinstance(layer, kinds))
        return next(found, None)

    @property
    def sharding_rules(self) -> tuple[Rule, ...]:
        """The dimensions that a mesh's `tensor` axis shards; empty for models without attention."""
        return select_rules({v.path: tuple(v.shape) for v in self.weights})

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Tensor:
        blocks = self._blocks
        if blocks is None or not blocks.serve(training):
            return super().call(inputs, training=training, mask=mask)
        return blocks.end(blocks.run(inputs, bool(training)), training=training)


@keras.saving.register_keras_serializable("tftpu")
class Structure(keras.layers.Layer):
    """A layer with the hyper-parameters of a `BlockModel`, which marks the borders of its blocks.

    Keras clones, saves and loads a functional model as a graph of layers, and passes only the graph
    to the model's constructor. So everything else must be stored in a layer.

    The layer is called with a list of tensors, the input of the first block and the output of each
    block, and returns the last one.

    Args:
        hyperparameters: the config that the model is built from, which also tells
            `tftpu.models.load_weights` the layout of weight files. Its `remat` "none" keeps all
            activations for the backward pass; "block" keeps only the input of each block, for about
            a third more arithmetic (Chen et al. 2016, https://arxiv.org/abs/1604.06174); others:
            see `BlockModel`. Its `scan`, if any, is "block" (one loop), "none" or "auto".
        shared: names of int32 inputs of the model that every block takes too.

    Raises:
        UserError: `remat` or `scan` is unknown, or a file has hyper-parameters of a class that is
            not in the zoo.
    """

    def __init__(
        self,
        hyperparameters: ModelConfig | Mapping[str, Any],
        shared: Sequence[str] = (),
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if isinstance(hyperparameters, Mapping):  # a `.keras` file holds the config as a dictionary
            hyperparameters = _decode_config(hyperparameters)
        self.hyperparameters = hyperparameters
        self.remat: str = getattr(hyperparameters, "remat", "none")
        checks.check_remat(self.remat)
        self.scan: str = getattr(hyperparameters, "scan", "none")
        checks.check_scan(self.scan)
        self.shared = tuple(shared)

    def call(self, borders: list[Tensor]) -> Tensor:
        return borders[-1]

    def get_config(self) -> dict[str, Any]:
        own = {"hyperparameters": _encode_config(self.hyperparameters), "shared": list(self.shared)}
        return {**super().get_config(), **own}


@dataclasses.dataclass(frozen=True)
class SubModel:
    """A wrapper of a model over some layers of another model.

    If an attribute of the outer model were a model itself, Keras would track it as a layer.
    """

    model: keras.Model


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The parts of a model whose blocks are recomputed, or run as one loop."""

    first: keras.Model  # everything before the first block
    blocks: tuple[keras.Model, ...]
    border: keras.KerasTensor  # the output of the last block, which `end` reads
    end: keras.Model
    shared: tuple[str, ...]  # names of the inputs that every block takes too
    remat: str  # the model's hyper-parameter: what the backward pass recomputes
    loop: bool  # whether the blocks run as one loop

    @classmethod
    def from_tensors(cls, inputs: Any, outputs: Any) -> "Blocks | None":
        """Splits a model into its blocks; returns None if it is neither recomputed nor a loop."""
        whole = keras.Model(inputs, outputs)
        layer = next((layer for layer in whole.layers if isinstance(layer, Structure)), None)
        if layer is None:
            return None
        loop = scanned.is_wanted(layer.scan, whole.count_params())
        if layer.remat in JAX_REMATS and keras.config.backend() != "jax":
            raise UserError(
                f"model.remat={layer.remat!r} works only on the JAX engine, but Keras runs on "
                f"{keras.config.backend()}: use engine=jax or model.remat='block'."
            )
        if not loop and layer.remat == "none":
            return None
        borders: Any = layer.input
        border: Any = layer.output
        shared = [whole.get_layer(known).output for known in layer.shared]
        blocks = tuple(keras.Model([x, *shared], y) for x, y in itertools.pairwise(borders))
        if loop and not scanned.is_uniform(blocks):
            if layer.scan == "block":
                raise UserError(
                    "model.scan='block' needs equal blocks, but these differ, for example in "
                    "their rates of stochastic depth: use model.scan='none'."
                )
            loop = False
        if not loop and layer.remat == "none":
            return None
        first, end = keras.Model(inputs, borders[0]), keras.Model(border, outputs)
        return cls(first, blocks, border, end, layer.shared, layer.remat, loop)

    def serve(self, training: bool | None) -> bool:
        """Returns whether to use `run`: in training, or for a loop while no cache is open."""
        return bool(training) or (self.loop and find_open_cache() is None)

    def run(self, inputs: Any, training: bool) -> Tensor:
        """Returns the output of the last block."""
        given = [inputs[name] for name in self.shared]
        given = [None if x is None else keras.ops.convert_to_tensor(x, "int32") for x in given]
        x = self.first(inputs, training=training)
        if self.loop:
            return scanned.run(self.blocks, x, given, training, self.remat if training else "none")
        for block in self.blocks:
            part = functools.partial(_run, block, given)
            x = run_recomputed(part, [block], x, self.remat)
        return x


def _run(block: keras.Model, given: list[Tensor | None], x: Tensor) -> Tensor:
    return block([x, *given], training=True)


def _encode_config(config: ModelConfig) -> dict[str, Any]:
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {
        "class": f"{type(config).__module__}.{type(config).__qualname__}",
        "fields": {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()},
    }


def _decode_config(encoded: Mapping[str, Any]) -> ModelConfig:
    """Reads the output of `_encode_config`."""
    module, _, name = encoded["class"].rpartition(".")
    # A file must not choose which modules are imported.
    cls = getattr(importlib.import_module(SIZES), name, None) if module == SIZES else None
    if cls is None:
        raise UserError(
            f"The file holds a model built from {encoded['class']}, which this version of tftpu "
            "does not have: load it with the version that saved it."
        )
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in encoded["fields"].items()})
