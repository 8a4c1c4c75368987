"""Chooses the Keras dtype policy of a precision, and sets it while a model is built."""

import contextlib
from collections.abc import Iterator

import keras

_AUTO = {"tpu": "mixed_bfloat16", "gpu": "mixed_float16", "cpu": "float32"}


def choose_policy(name: str | None, platform: str) -> str:
    """Returns the dtype policy for a precision on "tpu", "gpu" or "cpu"; for None, the current."""
    if name is None:
        return keras.config.dtype_policy().name
    return _AUTO[platform] if name == "auto" else name


@contextlib.contextmanager
def building_under(policy: str) -> Iterator[None]:
    """Sets Keras's global dtype policy within a `with` statement, and restores it afterwards."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
