"""The function that an exported model is: named inputs, preparation, model, named outputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.config import Data
from tftpu.config.data import ExportInputs
from tftpu.errors import UserError

TOKENS = "tokens"  # the only input of an exported language model
BATCH = "batch"  # the name of the only dimension that is not fixed


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of an exported model.

    Args:
        name: of the input.
        shape: of an example.
        dtype: such as "uint8".
        below: for integers, what random values are drawn below, to try the model with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int | None = None

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of a batch of any size."""
        return tf.TensorSpec((None, *self.shape), self.dtype, name=self.name)

    def drawn(self, examples: int, seed: int) -> np.ndarray:
        """Returns random values, always the same."""
        rng = np.random.default_rng(seed)
        size = (examples, *self.shape)
        if np.issubdtype(self.dtype, np.integer):
            return rng.integers(0, self.below or 256, size).astype(self.dtype)
        return rng.normal(size=size).astype(self.dtype)


class Serving:
    """A model as other programs call it.

    Args:
        model: built on Keras's TensorFlow backend, outside of any strategy.
        inputs: in order.
        prepare: returns the model's features, of the inputs in their order.
        class_names: by class id; None: they are not known.

    Attributes:
        model, inputs: the arguments.
        class_names: None also where the model does not return a score for each of them.
        function: the `tf.function` of the inputs, which returns outputs by name: "logits" or one
            for each output of the model; and "class" and "label" where the names are known.
    """

    def __init__(
        self,
        model: keras.Model,
        inputs: Sequence[Input],
        prepare: Callable[..., Any],
        class_names: Sequence[str] | None = None,
    ):
        self.model, self.inputs = model, tuple(inputs)
        known = class_names is not None and _classifies(model, class_names)
        names = self.class_names = list(class_names) if class_names and known else None

        def function(*given: Any) -> dict[str, Any]:
            outputs = model(prepare(*given), training=False)
            found = _named(outputs)
            if names is not None:
                found["class"] = tf.argmax(found["logits"], -1, tf.int32)
                found["label"] = tf.gather(tf.constant(names), found["class"])
            return found

        self.function = tf.function(
            function, input_signature=[i.spec for i in inputs], autograph=False
        )

    @property
    def weight_bytes(self) -> int:
        """The bytes of the variables."""
        return sum(v.value.dtype.size * v.value.shape.num_elements() for v in self.model.variables)

    def module(self) -> tf.Module:
        """Returns a module to save, which holds each weight once and no Keras objects."""
        found: Any = tf.Module()
        found.held = [variable.value for variable in self.model.variables]
        found.function = self.function
        return found

    def output_specs(self) -> dict[str, tf.TensorSpec]:
        """Returns the specs of the outputs by name."""
        return self.function.get_concrete_function().structured_outputs

    def drawn(self, examples: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Returns random inputs by name, always the same."""
        return {i.name: i.drawn(examples, seed + n) for n, i in enumerate(self.inputs)}

    def outputs(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for inputs by name."""
        found: Any = self.function(*(tf.constant(given[i.name]) for i in self.inputs))
        return {name: value.numpy() for name, value in found.items()}


def _named(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Mapping):
        return {str(name): tf.identity(value, str(name)) for name, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        return {f"output_{n}": tf.identity(value) for n, value in enumerate(outputs)}
    return {"logits": tf.identity(outputs, "logits")}


def inputs_of(
    model: keras.Model, data: Data, given: ExportInputs | None
) -> tuple[list[Input], Callable[..., Any]]:
    """Returns the inputs of an exported model, and what makes its features of them.

    Args:
        model: built.
        data: that it was trained on.
        given: as `data.export_inputs` returns it; None takes the model's own inputs, of a language
            model its tokens alone.
    """
    if given is not None:
        found = [Input(n, tuple(s), given.dtypes[n]) for n, s in given.shapes.items()]
        return found, given.prepare
    specs: Any = model.input
    if isinstance(specs, Mapping) and TOKENS in specs:
        specs = {TOKENS: specs[TOKENS]}
    flat = keras.tree.flatten(specs)
    vocabulary = getattr(getattr(model, "hyperparameters", None), "vocabulary", None)
    length = getattr(data, "context", None)
    names = list(specs) if isinstance(specs, Mapping) else [tensor.name for tensor in flat]
    found = []
    for name, tensor in zip(names, flat):
        shape = tuple(size or length or 0 for size in tensor.shape[1:])
        if 0 in shape:
            raise UserError(
                f"The model's input {name!r} has the shape {tuple(tensor.shape)}: all dimensions "
                "but the first must be fixed."
            )
        found.append(Input(name, shape, tensor.dtype, vocabulary))

    def prepare(*values: Any) -> Any:
        return keras.tree.pack_sequence_as(specs, list(values))

    return found, prepare


def _classifies(model: keras.Model, class_names: Sequence[str]) -> bool:
    """Returns whether a model returns a score for each of these classes."""
    shape = getattr(model, "output_shape", None)
    return isinstance(shape, tuple) and shape[1:] == (len(class_names),)
