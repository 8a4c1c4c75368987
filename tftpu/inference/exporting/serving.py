"""The function of an exported model: named inputs, preparation, model, named outputs."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.config.data import ExportInputs
from tftpu.engines import keras_internals
from tftpu.errors import UserError, did_you_mean
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.quantizing import Quantized
from tftpu.tensors import Nest

TOKENS = "tokens"  # the input that every language model has
# Exclusive upper limits of random values for a language model's other inputs.
_FEW = {"segments": 3, "positions": 2, "types": 2}
FILES = "image_bytes"  # the input of image files
BATCH = "batch"  # the name of the one dimension whose size is not fixed


class Serving:
    """A model as a function that other programs can call.

    Args:
        model: a model built on Keras's TensorFlow backend, outside of any strategy.
        inputs: the inputs in order.
        prepare: a function that maps the inputs, in their order, to the model's features.
        class_names: the class names by class id; None: unknown.
        quantized: the weights that the export stores as integers, by path.
        labels: whether the outputs include the names of the classes, as strings.
        decode: a function that maps the content of an image file to an example of the only input;
            None: the export takes no image files.

    Attributes:
        model, inputs, quantized: the arguments.
        class_names: the argument; None also if the model does not return a score for each class.
        function: the `tf.function` of the inputs, which returns outputs by name: "logits", or one
            for each output of the model; also "class" if `class_names` is not None, and then
            "label" if `labels` is True.
        of_files: the `tf.function` of the content of image files, `FILES`, with the same outputs;
            None without `decode`.
    """

    def __init__(
        self,
        model: keras.Model,
        inputs: Sequence[Input],
        prepare: Callable[..., Any],
        class_names: Sequence[str] | None = None,
        quantized: Mapping[str, Quantized] | None = None,
        labels: bool = True,
        decode: Callable[[Any], Any] | None = None,
    ):
        self.model, self.inputs, self.quantized = model, tuple(inputs), dict(quantized or {})
        self._prepare, self._labels = prepare, labels
        known = class_names is not None and _is_classifier(model, class_names)
        self.class_names = list(class_names) if class_names and known else None
        self._stored = {path: _Stored(value) for path, value in self.quantized.items()}

        def function(*given: Any) -> dict[str, Any]:
            return self._call_with_weights(
                given, [stored.value() for stored in self._stored.values()]
            )

        self.function = tf.function(
            function, input_signature=_build_specs(self.inputs), autograph=False
        )
        self.of_files: Any = None if decode is None else self._build_of_files(decode)

    def _build_of_files(self, decode: Callable[[Any], Any]) -> Any:
        [image] = self.inputs

        def of_files(encoded: Any) -> dict[str, Any]:
            with tf.device("CPU:0"):  # decodes and resizes images on a CPU, as in training
                spec = tf.TensorSpec(image.shape, image.dtype)
                images = tf.map_fn(decode, encoded, fn_output_signature=spec)
            return self.function(images)

        signature = [tf.TensorSpec((None,), tf.string, name=FILES)]
        return tf.function(of_files, input_signature=signature, autograph=False)

    @property
    def weight_bytes(self) -> int:
        """The size of the exported weights, in bytes."""
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

    def signatures(self) -> dict[str, Any]:
        """Returns the functions of a SavedModel, by the names of its signatures."""
        found = {"serving_default": self.function.get_concrete_function()}
        if self.of_files is not None:
            found["serving_bytes"] = self.of_files.get_concrete_function()
        return found

    def open_function(self) -> Any:
        """Returns a `tf.function` that takes the inputs, then the quantized weights in float32."""
        count = len(self.inputs)
        weights = [
            tf.TensorSpec(value.shape, tf.float32, name=format_weight_name(n))
            for n, value in enumerate(self.quantized.values())
        ]

        def function(*given: Any) -> dict[str, Any]:
            return self._call_with_weights(given[:count], given[count:])

        signature = [*_build_specs(self.inputs), *weights]
        return tf.function(function, input_signature=signature, autograph=False)

    def _call_with_weights(self, given: Sequence[Any], weights: Sequence[Any]) -> dict[str, Any]:
        """Returns the outputs by name, computed with the given values of the quantized weights."""
        by_path = {v.path: v for v in self.model.variables}
        replaced = [(by_path[path], value) for path, value in zip(self.quantized, weights)]
        with keras.StatelessScope(replaced) if replaced else contextlib.nullcontext():
            found = _name_outputs(self.model(self._prepare(*given), training=False))
        if self.class_names is not None:
            found["class"] = tf.argmax(found["logits"], -1, tf.int32)
        if self.class_names is not None and self._labels:
            found["label"] = tf.gather(tf.constant(self.class_names), found["class"])
        return found

    def output_specs(self) -> dict[str, tf.TensorSpec]:
        """Returns the specs of the outputs by name."""
        return self.function.get_concrete_function().structured_outputs

    def draw_examples(self, examples: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Returns random inputs by name; the same arguments give the same inputs."""
        return {i.name: i.draw_examples(examples, seed + n) for n, i in enumerate(self.inputs)}

    def draw_files(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Returns two random image files, a JPEG and a PNG, by the name of their input."""
        [image] = self.inputs
        height, width, channels = image.shape
        rng = np.random.default_rng(seed)
        drawn = rng.integers(0, 256, (2 * height + 1, 3 * width, channels), np.uint8)
        encoded = [tf.io.encode_jpeg(drawn).numpy(), tf.io.encode_png(drawn).numpy()]
        return {FILES: np.array(encoded)}  # no file ends in zero bytes, which NumPy drops

    def outputs(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for inputs by name."""
        if FILES in given:
            found: Any = self.of_files(tf.constant(given[FILES]))
        else:
            found = self.function(*(tf.constant(given[i.name]) for i in self.inputs))
        return {name: value.numpy() for name, value in found.items()}


class _Stored:
    """A quantized weight in a SavedModel: variables for the integers and for the scales."""

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


def _build_specs(inputs: Sequence[Input]) -> list[tf.TensorSpec]:
    """Returns the specs of batches of any size."""
    return [tf.TensorSpec((None, *i.shape), i.dtype, name=i.name) for i in inputs]


def format_weight_name(number: int) -> str:
    """Returns the name that a quantized weight has as an input of `Serving.open_function`."""
    return f"weight_{number}"


def _name_outputs(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Mapping):
        return {str(name): tf.identity(value, str(name)) for name, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        return {f"output_{n}": tf.identity(value) for n, value in enumerate(outputs)}
    return {"logits": tf.identity(outputs, "logits")}


def build_inputs(
    model: keras.Model,
    features: Nest,
    given: ExportInputs | None,
    chosen: Sequence[str] | None = None,
) -> tuple[list[Input], Callable[..., Any]]:
    """Returns an exported model's inputs, and a function that maps them to its features.

    Args:
        model: the built model.
        features: the specs of a batch of data, for the sizes that the model's inputs leave open.
        given: the result of `data.export_inputs`; None: the inputs of the model are used.
        chosen: names of inputs of a language model, including its tokens; None: the names in
            `features`.

    Raises:
        UserError: an input is nested or has an unknown size, or `chosen` has unknown inputs, lacks
            required ones, or is given although the model is not a language model.
    """
    specs: Any = getattr(model, "input", None)
    language = isinstance(specs, Mapping) and TOKENS in specs
    if chosen is not None:
        _check_chosen(model, chosen, language, given)
    if given is not None:
        found = [Input(n, tuple(s), given.dtypes[n]) for n, s in given.shapes.items()]
        return found, given.prepare
    if language:
        known = features if isinstance(features, Mapping) else {TOKENS: features}
        taken = [name for name in specs if name in known] if chosen is None else chosen
        _check_needed(model, taken)
        specs, features = {name: specs[name] for name in taken}, {TOKENS: known[TOKENS], **known}
    size = getattr(getattr(model, "hyperparameters", None), "vocabulary", None)
    indices, found = size or _find_index_limit(model), []
    for name, (tensor, shape) in _describe_inputs(specs, features).items():
        below = size if name == TOKENS else None
        tried = _FEW.get(name, indices) if language else indices
        found.append(Input(name, shape, tensor.dtype, below, tried))

    def prepare(*values: Any) -> Any:
        if isinstance(specs, Mapping):  # the values are in the order of `specs`, not sorted by name
            return dict(zip(specs, values, strict=True))
        return keras.tree.pack_sequence_as(specs, list(values))

    return found, prepare


def _find_index_limit(model: keras.Model) -> int:
    """Returns the size of a model's smallest embedding table; 256 if it has none."""
    kinds = keras.layers.Embedding
    tables = [v for v in keras_internals.list_layers(model) if isinstance(v, kinds)]
    return min((table.input_dim for table in tables), default=256)


def _check_chosen(
    model: keras.Model, chosen: Sequence[str], language: bool, given: ExportInputs | None
) -> None:
    if given is not None:
        raise UserError(
            f"The model's data determine the inputs of its export, {', '.join(given.shapes)}: "
            "choose no inputs."
        )
    if not language:
        raise UserError(
            f"Inputs can be chosen only for language models, but the model {model.name!r} has no "
            f"input {TOKENS!r}: choose no inputs."
        )
    known: Any = model.input
    for name in chosen:
        if name not in known:
            raise UserError(f"The model has no input {name!r}.{did_you_mean(name, known)}")
    if TOKENS not in chosen:
        raise UserError(f"The inputs {', '.join(chosen)} lack {TOKENS!r}: add them.")


def _check_needed(model: keras.Model, taken: Sequence[str]) -> None:
    """Raises `UserError` if a required input is left out."""
    layers = [v for v in model.layers if isinstance(v, keras.layers.InputLayer)]
    needed = {id(v.output) for v in layers if not v.optional}
    specs: Any = model.input
    for name, tensor in specs.items():
        if name not in taken and id(tensor) in needed:
            raise UserError(
                f"The model needs the input {name!r}: choose {', '.join([*taken, name])}."
            )


def _describe_inputs(specs: Nest, features: Nest) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns the tensors of a model's inputs, and their shapes without the batch, by name."""
    named = isinstance(specs, Mapping)
    flat = list(specs.values()) if named else keras.tree.flatten(specs)
    if not all(isinstance(tensor, keras.KerasTensor) for tensor in flat):
        raise UserError("The model's inputs are nested: give it a flat list or dictionary of them.")
    names = list(specs) if named else [tensor.name for tensor in flat]
    theirs = keras.tree.flatten(features)
    by_name = features if isinstance(features, Mapping) else {}
    # Several features are matched to inputs by place only if their order has a meaning, which that
    # of a dictionary does not have.
    by_place = len(flat) == len(theirs) and (len(flat) == 1 or not by_name)
    found = {}
    for number, (name, tensor) in enumerate(zip(names, flat)):
        spec = by_name.get(name, by_name.get(TOKENS, theirs[number] if by_place else None))
        shape = tuple(tensor.shape[1:])
        said = tuple(spec.shape[1:]) if spec is not None else ()
        if len(said) == len(shape):
            shape = tuple(here or there for here, there in zip(shape, said))
        if None in shape:
            raise UserError(
                f"The model's input {name!r} has the shape {tuple(tensor.shape)}: the model or "
                "its data must fix all dimensions except the first."
            )
        found[name] = tensor, shape
    return found


def _is_classifier(model: keras.Model, class_names: Sequence[str]) -> bool:
    """Returns whether a model returns a score for each of the classes."""
    shape = getattr(model, "output_shape", None)
    return isinstance(shape, tuple) and shape[1:] == (len(class_names),)
