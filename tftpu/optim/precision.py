"""Precision by name: a thin layer over Keras's global dtype policy."""

import keras

from tftpu.config import PRECISIONS
from tftpu.errors import UserError, did_you_mean
from tftpu.optim.policy import choose_policy


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
    from tftpu.engines.selection import find_attached_platform

    if name not in PRECISIONS:
        raise UserError(f"There is no precision {name!r}.{did_you_mean(name, PRECISIONS)}")
    platform = find_attached_platform()
    policy = choose_policy(name, platform)
    if policy == "mixed_float16" and platform == "tpu":
        raise UserError(
            "mixed_float16 is slow on a TPU, which emulates it: use mixed_bfloat16, which is "
            "native and needs no loss scale."
        )
    keras.config.set_dtype_policy(policy)
    return policy
