"""Logits of a vocabulary that remember their factors, so that a loss can do without them."""

from typing import Any

from keras import ops


def vocabulary_logits(x: Any, matrix: Any) -> Any:
    """`x @ matrix.T` in float32.

    The product has the attribute `tftpu_factors`, the pair (x, matrix): from it
    `tftpu.optim.losses.SmoothedCrossentropy` computes its value in chunks. If nothing else reads the
    logits, as a metric would, the compiler leaves this product out.

    Args:
        x: (batch, time, width), in the compute dtype: of a layer with `autocast=False`.
        matrix: (vocabulary, width), a Keras variable.

    Returns:
        (batch, time, vocabulary), float32.
    """
    matrix = ops.convert_to_tensor(matrix)
    rounded = ops.cast(ops.cast(matrix, x.dtype), "float32")
    logits = ops.matmul(ops.cast(x, "float32"), ops.transpose(rounded))
    logits.tftpu_factors = (x, matrix)
    return logits
