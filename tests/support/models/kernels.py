"""Pallas kernels on a CPU, by Pallas's interpreter."""

import functools

import pytest

from tftpu import sharding
from tftpu.kernels import flash, functions, internals


@pytest.fixture
def interpreted(monkeypatch):
    """Makes `attention="flash"` run the kernels by Pallas's interpreter, in small blocks."""
    from jax.experimental import jax2tf

    if not internals.can_embed_jax():
        pytest.skip("this TensorFlow reads kernels of older versions of jax only")

    def call(function, inputs, outputs):
        return jax2tf.convert(functools.partial(function, interpret=True), with_gradient=False)

    monkeypatch.setattr(flash, "BLOCK", 128)
    monkeypatch.setattr(functions, "_call", call)
    with sharding.compiling_for("tpu"):
        yield
