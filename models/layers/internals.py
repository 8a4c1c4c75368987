"""The private interfaces of Keras that the layers use, each behind one function.

Tried with Keras 3.15.1, by the tests of scanned blocks.
"""

from typing import Any

import keras


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
