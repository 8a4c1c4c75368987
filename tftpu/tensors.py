"""Types of tensors, for annotations, and `keras.ops` without its annotations."""

from typing import Any

import keras

# A tensor of Keras's backend; TensorFlow and JAX publish no types that fit both.
Tensor = Any
# A nest (list, tuple, dict) of tensors, arrays or specs, as a Keras model takes and returns them.
Nest = Any
# `keras.ops`: its inferred return types include None, which callers never get.
ops: Any = keras.ops
# A Keras initializer; Keras's layers are annotated to accept only names.
Initializer = Any
