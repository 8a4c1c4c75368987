"""Processes whose Keras runs on JAX: one process has one backend."""

import os
import subprocess
import sys


def output(module: str, *arguments: str) -> str:
    """Returns what a module of `tests.support` prints on Keras's JAX backend."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
