"""The private interfaces of Keras that the layers use, each behind one function.

Tested with Keras 3.15.1 by the tests of scanned blocks and of adapters.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import stateless_scope

from tftpu.tensors import Tensor


def read_stored_value(variable: keras.Variable) -> Tensor:
    """Returns the stored value of a variable, without the changes that a layer sees."""
    private: Any = variable
    scope: Any = stateless_scope.get_stateless_scope()
    value = scope.get_current_value(variable) if scope is not None else None
    return private._value if value is None else value


def compute_dtypes(model: keras.Model) -> dict[int, str]:
    """Returns the dtype in which its layer uses each variable of a model, by id of the variable.

    Variables that no layer casts are left out.
    """
    found: dict[int, str] = {}
    for layer in flatten_layers(model):  # outer layers come first, so the innermost one decides
        if layer.autocast:
            found |= {id(v): layer.compute_dtype for v in layer.variables if v._autocast}
    return found


def flatten_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns a layer, or a model, and all layers in it, outer ones first."""
    private: Any = layer
    return list(private._flatten_layers())


def find_stored_matrix(layer: keras.Layer) -> keras.Variable:
    """Returns the variable of a kernel or of embeddings, without what LoRA adds to it.

    Integers where the layer is quantized, two to a byte where they have 4 bits.
    """
    private: Any = layer
    return private._embeddings if isinstance(layer, keras.layers.Embedding) else private._kernel


@contextlib.contextmanager
def becoming_quantized(layer: keras.Layer, floats: keras.Variable) -> Iterator[None]:
    """Lets a built layer replace its float variables by integer ones within the block.

    Keras's way is to delete the attribute, for which it collects garbage among all objects of the
    process: seconds of a model with many layers.
    """
    private: Any = layer
    private._untrack_variable(floats)
    private._tracker.unlock()
    try:
        yield
    finally:
        private._tracker.lock()
    private._is_quantized = True  # otherwise Keras would ask the layer to quantize itself


def count_rows_per_scale(layer: keras.Layer) -> int:
    """Returns how many rows of a 4-bit kernel share a scale; 0 means all."""
    rows = getattr(layer, "_int4_block_size", None) or 0
    return max(rows, 0)
