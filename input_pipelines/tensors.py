"""Names for TensorFlow's values in signatures."""

from typing import Any

# TensorFlow's published types leave out the operators and slices of its tensors.
Tensor = Any  # a `tf.Tensor`
Batch = Any  # nested tensors; their first dimension counts the examples
Spec = Any  # nested `tf.TensorSpec`s
