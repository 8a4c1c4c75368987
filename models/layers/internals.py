"""The private interfaces of Keras that the layers use, each behind one function.

Tried with Keras 3.15.1, by the tests of scanned blocks.
"""

from typing import Any

import keras
from keras.src.backend.common import stateless_scope

from tftpu.tensors import Tensor


def stored_value(variable: keras.Variable) -> Tensor:
    """Returns the value of a variable as it is stored: not as a layer that reads it gets it."""
    private: Any = variable
    scope: Any = stateless_scope.get_stateless_scope()
    value = scope.get_current_value(variable) if scope is not None else None
    return private._value if value is None else value


def compute_dtypes(model: keras.Model) -> dict[int, str]:
    """Returns the dtype in which its layer uses each variable of a model, by id of the variable.

    Variables that no layer casts are left out.
    """
    private: Any = model
    found: dict[int, str] = {}
    for layer in private._flatten_layers():  # outer ones first: the innermost decides
        if layer.autocast:
            found |= {id(v): layer.compute_dtype for v in layer.variables if v._autocast}
    return found
