"""The private interfaces of Keras's JAX backend that the kernels use, each behind one function.

Tested with Keras 3.15.1 and jax 0.10.2, by the tests of Keras's own attention.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax


@contextlib.contextmanager
def replacing_attention(attend: Callable[..., Any]) -> Iterator[None]:
    """Makes Keras's layers compute attention with another function within the block.

    Args:
        attend: a function of Keras's original function, and of the arguments of
            `keras.ops.dot_product_attention`.
    """
    from keras.src.backend.jax import nn

    private: Any = nn
    original = private.dot_product_attention
    private.dot_product_attention = functools.partial(attend, original)
    try:
        yield
    finally:
        private.dot_product_attention = original


@contextlib.contextmanager
def reporting_devices(platform: str) -> Iterator[None]:
    """Makes `jax.devices()` report one device of a platform within the block."""
    original = jax.devices

    def report(backend: Any = None) -> list[Any]:
        if backend is not None:
            return original(backend)
        return [SimpleNamespace(platform=platform, device_kind=platform, id=0)]

    jax.devices = report
    try:
        yield
    finally:
        jax.devices = original
