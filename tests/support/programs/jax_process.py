"""Processes whose Keras runs on JAX: one process has one backend."""

import os
import sys

from tests.support import warm

# Most of what tests compile runs once: compiling it well takes longer than it runs.
QUICK = "--xla_backend_optimization_level=0"


def output(module: str, *arguments: str, xla_flags: str = QUICK) -> str:
    """Returns what a module of `tests.support` prints on Keras's JAX backend."""
    done = warm.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        env={**os.environ, "KERAS_BACKEND": "jax", "XLA_FLAGS": xla_flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
