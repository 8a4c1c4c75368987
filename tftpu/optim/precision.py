"""Precision by name: a thin layer over Keras's global dtype policy."""

import keras
import tensorflow as tf

from tftpu.config import PRECISIONS
from tftpu.errors import UserError, did_you_mean


def set_precision(name: str = "auto") -> str:
    """Sets the precision of every layer that is built after this call.

    Args:
        name: "float32"; "mixed_bfloat16" or "mixed_float16" (16-bit arithmetic, float32 weights;
            float16 adds a dynamic loss scale); "auto": bfloat16 on a TPU, float16 on a GPU,
            float32 on a CPU.

    Returns:
        The policy that was set.

    Raises:
        UserError: an unknown name, or float16 on a TPU.
    """
    if name not in PRECISIONS:
        raise UserError(f"There is no precision {name!r}.{did_you_mean(name, PRECISIONS)}")
    on_tpu = bool(tf.config.list_logical_devices("TPU"))
    if name == "auto":
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        name = "mixed_bfloat16" if on_tpu else "mixed_float16" if on_gpu else "float32"
    if name == "mixed_float16" and on_tpu:
        raise UserError(
            "mixed_float16 is emulated on a TPU, slowly: use mixed_bfloat16, which is native and "
            "needs no loss scale."
        )
    keras.config.set_dtype_policy(name)
    return name
