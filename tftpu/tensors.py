"""Types of tensors, for annotations, and `keras.ops` without its annotations."""

from typing import Any

import keras

# A tensor of Keras's backend. TensorFlow and JAX publish no types that fit both.
Tensor = Any
# A tensor, array or spec, or a list, tuple or dict of them, also nested, as a Keras model takes and
# returns.
Nest = Any
# `keras.ops` as Any, because its inferred return types include None, which callers never get.
ops: Any = keras.ops
# A Keras initializer as Any, because Keras annotates its layers to accept only names.
Initializer = Any
