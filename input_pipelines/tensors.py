"""Type names for TensorFlow's values, and a decorator for functions of tensors."""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

_F = TypeVar("_F", bound=Callable[..., Any])

# TensorFlow's published types leave out the operators and slices of its tensors.
Tensor = Any  # a `tf.Tensor`
Batch = Any  # nested tensors; their first dimension counts the examples
Spec = Any  # nested `tf.TensorSpec`s


def skip_autograph(function: _F) -> _F:
    """Makes tf.data's AutoGraph skip a function, which must not have Python control flow.

    The conversion would take about 50 ms at every start.
    """
    marked: Any = tf.autograph.experimental.do_not_convert(function)
    return marked
