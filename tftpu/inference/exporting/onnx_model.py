"""Converts TensorFlow's graph to an ONNX model, with named inputs, outputs and dimensions."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tftpu import installation
from tftpu.amounts import format_size
from tftpu.errors import UserError
from tftpu.inference.exporting import onnx_operations, onnx_seal, onnx_weights
from tftpu.inference.exporting.serving import BATCH, Serving

OPSET = 18
_MOST = 2**31 - 2**20  # most bytes of weights in a protobuf file


def write(serving: Serving, path: Path, about: Mapping[str, Any]) -> None:
    """Writes a model as one file.

    Args:
        serving: the model.
        path: the path of the file.
        about: JSON values for its metadata, by name.

    Raises:
        UserError: the converter is not installed, the weights do not fit into one file, or the
            model cannot be converted.
    """
    try:
        import onnx
        import tf2onnx
    except ImportError as error:
        raise UserError(
            f"--format=onnx needs tf2onnx: run `{installation.command('onnx')}`."
        ) from error
    if serving.weight_bytes > _MOST:
        raise UserError(
            f"The weights take {format_size(serving.weight_bytes)}, but an ONNX file holds at "
            "most 2 GiB: use --format=saved_model."
        )
    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)
    try:
        function = serving.open_function() if serving.quantized else serving.function
        function = onnx_operations.flatten_function(function)
        model, _ = tf2onnx.convert.from_function(
            function,
            function.input_signature,
            opset=OPSET,
            custom_op_handlers=onnx_operations.list_handlers(),
        )
        onnx_operations.store_constants(model, function)
        if serving.quantized:
            model = onnx_weights.convert_to_integers(model, list(serving.quantized.values()))
        onnx.checker.check_model(model)
    except (ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"The model cannot be converted to ONNX ({' '.join(lines)[:300]}): choose "
            "--format=saved_model."
        ) from error
    shapes = {i.name: i.shape for i in serving.inputs} | {
        name: tuple(spec.shape[1:]) for name, spec in serving.output_specs().items()
    }
    for value in [*model.graph.input, *model.graph.output]:
        _name_dimensions(value.type.tensor_type.shape, shapes[value.name])
    for name, value in about.items():
        model.metadata_props.add(key=name, value=json.dumps(value))
    model.metadata_props.add(**onnx_seal.make_blank_entry())
    onnx_seal.write_sealed(path, model.SerializeToString())


def _name_dimensions(shape: Any, known: tuple[int | None, ...]) -> None:
    """Names the batch dimension, and sets the sizes that the converter left unknown."""
    del shape.dim[:]
    shape.dim.add(dim_param=BATCH)
    for size in known:
        shape.dim.add(**({} if size is None else {"dim_value": size}))
