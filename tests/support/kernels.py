"""Pallas kernels on a CPU, by Pallas's interpreter."""

import functools

import pytest

from tftpu.models.kernels import flash, internals, tensorflow_ops
from tftpu.tpu import target


@pytest.fixture
def interpreted(monkeypatch):
    """Makes `attention="flash"` run the kernels by Pallas's interpreter, in small blocks."""
    from jax.experimental import jax2tf

    if not internals.reads_what_jax_writes():
        pytest.skip("this TensorFlow reads kernels of older versions of jax only")

    def in_graph(function):
        return jax2tf.convert(functools.partial(function, interpret=True), with_gradient=False)

    monkeypatch.setattr(flash, "BLOCK", 128)
    monkeypatch.setattr(tensorflow_ops, "_in_graph", in_graph)
    with target.compiling_for("tpu"):
        yield
