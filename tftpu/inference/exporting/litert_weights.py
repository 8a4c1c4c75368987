"""Integer weights of LiteRT models, which DEQUANTIZE converts to floats when a model is loaded.

TensorFlow Lite's converter has no such form: it would convert integers in a graph to floats in
every call, and its own quantization also rounds activations. But even if the converter transposes a
weight, or scales its channels by the norm that follows, rounded weights are still integers of 8
bits times a scale for each channel. So they are recognized in the finished flatbuffer, where
weights have no names.
"""

from typing import Any

import numpy as np

from tftpu.inference.quantizing import SMALLEST

_LARGEST = 127  # the integer of a channel's largest value
_OFF = 1e-4  # largest distance of value / scale from an integer, by rounding in float32


def convert_to_integers(flatbuffer: bytes) -> bytes:
    """Returns a model whose weights of 8 bits are stored as integers.

    Args:
        flatbuffer: the model, with weights in float32. Weights that are not integers times a scale
            for each channel stay unchanged.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model: Any = schema.ModelT.InitFromPackedBuf(flatbuffer, 0)
    added = _Added(model, schema)
    for graph in model.subgraphs:
        added.replace_weights(graph)
    used = {tensor.buffer for graph in model.subgraphs for tensor in graph.tensors}
    used |= {entry.buffer for entry in model.metadata}
    for number, buffer in enumerate(model.buffers):
        if number not in used:
            buffer.data = None
    builder = flatbuffers.Builder(len(flatbuffer) // 2)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


class _Added:
    """The tensors and nodes that are added to a model."""

    def __init__(self, model: Any, schema: Any):
        self._model, self._schema = model, schema
        code = schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
        code.version = 5  # the first version that has a scale for each channel
        self._code = len(model.operatorCodes)
        model.operatorCodes.append(code)

    def replace_weights(self, graph: Any) -> None:
        """Stores the weights of a graph as integers, which nodes at its start convert to floats."""
        nodes = []
        for number, tensor in enumerate(list(graph.tensors)):
            data = self._model.buffers[tensor.buffer].data
            if tensor.type != self._schema.TensorType.FLOAT32 or data is None:
                continue
            value = np.asarray(data).view("<f4").reshape(tensor.shape)
            found = _find_integers(value) if value.ndim > 1 and value.size >= SMALLEST else None
            if found is not None:
                graph.tensors.append(self._add_tensor(tensor, *found))
                nodes.append(self._add_dequantization(len(graph.tensors) - 1, number))
                tensor.buffer = 0  # the empty buffer, which computed tensors have
        graph.operators = [*nodes, *graph.operators]

    def _add_tensor(self, floats: Any, axis: int, codes: np.ndarray, scale: np.ndarray) -> Any:
        buffer, tensor = self._schema.BufferT(), self._schema.TensorT()
        buffer.data = codes.reshape(-1).view(np.uint8)
        self._model.buffers.append(buffer)
        tensor.buffer = len(self._model.buffers) - 1
        tensor.type = self._schema.TensorType.INT8
        tensor.shape, tensor.hasRank = floats.shape, True
        tensor.name = floats.name + b"/integers"
        tensor.quantization = self._schema.QuantizationParametersT()
        tensor.quantization.scale = scale.reshape(-1)
        tensor.quantization.zeroPoint = np.zeros(scale.size, np.int64)
        tensor.quantization.quantizedDimension = axis
        return tensor

    def _add_dequantization(self, given: int, returned: int) -> Any:
        node = self._schema.OperatorT()
        node.opcodeIndex = self._code
        node.inputs, node.outputs = [given], [returned]
        return node


def _find_integers(value: np.ndarray) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Returns the channels' dimension, int8 codes, float32 scales; None if no scales fit."""
    for axis, channels in enumerate(value.shape):
        scale = _find_scales(np.moveaxis(value, axis, 0).reshape(channels, -1))
        if scale is not None:
            scale = scale.reshape([channels if n == axis else 1 for n in range(value.ndim)])
            return axis, np.rint(value / scale).astype(np.int8), scale
    return None


def _find_scales(rows: np.ndarray) -> np.ndarray | None:
    """Returns for each row the scale of its integers, float32; None if a row has no such scale."""
    reach = np.abs(rows).max(1)
    reach[reach == 0] = 1.0
    scale = reach / np.float32(_LARGEST)
    left = np.flatnonzero(~_is_integral(rows, scale))
    # No row fits: the scales belong to another dimension, or the values are not integers.
    if len(left) == len(rows):
        return None
    # Channels that were quantized with one scale, as in attention heads, may have no integer 127.
    for largest in range(_LARGEST - 1, 0, -1):
        scale[left] = reach[left] / np.float32(largest)
        left = left[~_is_integral(rows[left], scale[left])]
    return None if len(left) else scale


def _is_integral(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # masks contain infinities
        steps = rows / scale[:, None]
        return np.all(np.abs(steps - np.rint(steps)) <= _OFF, 1)
