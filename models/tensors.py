"""`keras.ops` and tensors, as type checkers should see them."""

from typing import Any

import keras

Initializer = Any  # of Keras, whose layers are annotated as if they took only names of them
Tensor = Any  # a tensor of Keras's backend, or the symbolic tensor of a functional model
ops: Any = keras.ops  # Keras's own annotations say that most of its functions may return None
