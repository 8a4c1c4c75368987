"""Converts TensorFlow's graph to a LiteRT model of operations that every LiteRT has.

The converter is TensorFlow's own, without its fallback to TensorFlow's operations (Flex). It can
convert `erf` only as a part of GELU, in the formula of `tftpu.models.layers.gelu` and
`keras.activations.gelu`: the whole formula becomes one operation of LiteRT.

Metadata for programs is added as TensorFlow Lite's own tools do it: as files in a zip archive after
the model, which interpreters ignore.
"""

import importlib.util
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tftpu import installation
from tftpu.amounts import format_size
from tftpu.errors import UserError
from tftpu.inference.exporting import litert_weights
from tftpu.inference.exporting.serving import Serving

_MOST = 2**31 - 2**24  # most bytes of weights in a flatbuffer, which leaves some for the graph


def write(serving: Serving, path: Path, about: Mapping[str, Any]) -> None:
    """Writes a model as one file, with "labels.txt" and "about.json" inside.

    Args:
        serving: the model, whose quantized weights have 8 bits.
        path: the path of the file.
        about: JSON values for "about.json", by name.

    Raises:
        UserError: LiteRT is not installed, the weights do not fit into one file, or the model
            cannot be converted, for example because LiteRT lacks an operation.
    """
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise UserError(
            f"--format=litert needs ai-edge-litert: run `{installation.command('litert')}`."
        )
    # Bytes of the converter's weights, which are float32 even if the export has integers.
    floats = 4 * serving.model.count_params()
    if floats > _MOST:
        raise UserError(
            f"The weights take {format_size(floats)} in float32, but a LiteRT file holds at most "
            "2 GiB: use --format=saved_model."
        )
    model = _convert_flatbuffer(serving)
    path.write_bytes(litert_weights.convert_to_integers(model) if serving.quantized else model)
    with zipfile.ZipFile(path, "a") as inside:
        if serving.class_names is not None:
            inside.writestr("labels.txt", "".join(f"{name}\n" for name in serving.class_names))
        inside.writestr("about.json", json.dumps(dict(about)))


def _convert_flatbuffer(serving: Serving) -> bytes:
    """Returns the flatbuffer, with weights in float32."""
    function: Any = serving.function
    module: Any = serving.module()
    if serving.quantized:
        function, module.rounded = _build_float_function(serving)
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [function.get_concrete_function()], module
    )
    try:
        return converter.convert()
    except Exception as error:  # the converter's errors have no public class
        raise UserError(
            f"The model cannot be converted to LiteRT ({_find_reason(str(error))}): choose "
            "--format=saved_model or --format=onnx."
        ) from error


def _build_float_function(serving: Serving) -> tuple[Any, list[tf.Variable]]:
    """Returns a function of the inputs that uses rounded float32 weights, and these weights.

    Integers would stay in the graph and be converted to floats in every call.
    """
    floats = (tf.constant(value.values) for value in serving.quantized.values())
    weights = [tf.Variable(value, trainable=False) for value in floats]
    opened = serving.open_function()

    def function(*given: Any) -> dict[str, Any]:
        return opened(*given, *(weight.value() for weight in weights))

    signature = serving.function.input_signature
    return tf.function(function, input_signature=signature, autograph=False), weights


def _find_reason(message: str) -> str:
    """Extracts the missing operations, or else the error, from a message with the whole graph."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    kinds = ("TF Select ops:", "Custom ops:")
    missing = [line.partition(":")[2].strip() for line in lines if line.startswith(kinds)]
    if missing:
        return f"LiteRT has no {', '.join(missing)}"
    return next(iter(lines), "no reason given").rpartition("error: ")[2][:300]
