"""The function that an exported model is: named inputs, preparation, model, named outputs."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.config import Data
from tftpu.config.data import ExportInputs
from tftpu.errors import UserError
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.quantizing import Quantized

TOKENS = "tokens"  # the only input of an exported language model
BATCH = "batch"  # the name of the only dimension that is not fixed


class Serving:
    """A model as other programs call it.

    Args:
        model: built on Keras's TensorFlow backend, outside of any strategy.
        inputs: in order.
        prepare: returns the model's features, of the inputs in their order.
        class_names: by class id; None: they are not known.
        quantized: weights by path that are integers in the export.
        labels: whether the outputs include the names of the classes, as strings.

    Attributes:
        model, inputs, quantized: the arguments.
        class_names: None also where the model does not return a score for each of them.
        function: the `tf.function` of the inputs, which returns outputs by name: "logits" or one
            for each output of the model; and where the names are known "class" and, if wanted,
            "label".
    """

    def __init__(
        self,
        model: keras.Model,
        inputs: Sequence[Input],
        prepare: Callable[..., Any],
        class_names: Sequence[str] | None = None,
        quantized: Mapping[str, Quantized] | None = None,
        labels: bool = True,
    ):
        self.model, self.inputs, self.quantized = model, tuple(inputs), dict(quantized or {})
        self._prepare, self._labels = prepare, labels
        known = class_names is not None and _classifies(model, class_names)
        self.class_names = list(class_names) if class_names and known else None
        self._stored = {path: _Stored(value) for path, value in self.quantized.items()}

        def function(*given: Any) -> dict[str, Any]:
            return self._called(given, [stored.value() for stored in self._stored.values()])

        self.function = tf.function(function, input_signature=_specs(self.inputs), autograph=False)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights."""
        whole = [v.value for v in self.model.variables if v.path not in self.quantized]
        floats = sum(v.dtype.size * v.shape.num_elements() for v in whole)
        return floats + sum(value.bytes for value in self.quantized.values())

    def module(self) -> tf.Module:
        """Returns a module to save, which holds each weight once and no Keras objects."""
        found: Any = tf.Module()
        found.held = [v.value for v in self.model.variables if v.path not in self.quantized]
        found.stored = [part for stored in self._stored.values() for part in stored.parts]
        found.function = self.function
        return found

    def open_function(self) -> Any:
        """Returns the `tf.function` of the inputs and of the quantized weights, in float32."""
        count = len(self.inputs)
        weights = [
            tf.TensorSpec(value.shape, tf.float32, name=weight_name(n))
            for n, value in enumerate(self.quantized.values())
        ]

        def function(*given: Any) -> dict[str, Any]:
            return self._called(given[:count], given[count:])

        signature = [*_specs(self.inputs), *weights]
        return tf.function(function, input_signature=signature, autograph=False)

    def _called(self, given: Sequence[Any], weights: Sequence[Any]) -> dict[str, Any]:
        """Returns the outputs by name, computed with weights in place of the quantized ones."""
        by_path = {v.path: v for v in self.model.variables}
        replaced = [(by_path[path], value) for path, value in zip(self.quantized, weights)]
        with keras.StatelessScope(replaced) if replaced else contextlib.nullcontext():
            found = _named(self.model(self._prepare(*given), training=False))
        if self.class_names is not None:
            found["class"] = tf.argmax(found["logits"], -1, tf.int32)
        if self.class_names is not None and self._labels:
            found["label"] = tf.gather(tf.constant(self.class_names), found["class"])
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


class _Stored:
    """A quantized weight in a SavedModel: variables of integers and of scales."""

    def __init__(self, quantized: Quantized):
        self._shape, self._codes_shape = quantized.shape, quantized.codes.shape
        self._bits = quantized.bits
        codes = quantized.packed if quantized.bits == 4 else quantized.codes
        parts = tf.constant(codes), tf.constant(quantized.scale)
        self.parts = [tf.Variable(part, trainable=False) for part in parts]

    def value(self) -> Any:
        """Returns the weight in float32."""
        codes, scale = (tf.convert_to_tensor(part) for part in self.parts)
        if self._bits == 4:
            halves = tf.stack(
                [codes & 15, tf.bitwise.right_shift(codes, tf.constant(4, tf.uint8))], 1
            )
            flat = tf.reshape(halves, [-1])[: int(np.prod(self._shape))]
            codes = tf.reshape(tf.cast(flat, tf.int8) - 8, self._codes_shape)
        return tf.reshape(tf.cast(codes, tf.float32) * scale, self._shape)


def _specs(inputs: Sequence[Input]) -> list[tf.TensorSpec]:
    """Returns the specs of batches of any size."""
    return [tf.TensorSpec((None, *i.shape), i.dtype, name=i.name) for i in inputs]


def weight_name(number: int) -> str:
    """Returns the name that a quantized weight has as an input of `Serving.open_function`."""
    return f"weight_{number}"


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
