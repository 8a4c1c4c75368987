"""Names for TensorFlow's values in signatures, and a mark for functions of them."""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

_F = TypeVar("_F", bound=Callable[..., Any])

# TensorFlow's published types leave out the operators and slices of its tensors.
Tensor = Any  # a `tf.Tensor`
Batch = Any  # nested tensors; their first dimension counts the examples
Spec = Any  # nested `tf.TensorSpec`s


def skip_autograph(function: _F) -> _F:
    """Marks a function without Python's control flow: AutoGraph, which tf.data calls, leaves it.

    Its translation would take some 50 ms at every start.
    """
    marked: Any = tf.autograph.experimental.do_not_convert(function)
    return marked
