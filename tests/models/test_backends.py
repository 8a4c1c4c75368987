"""The zoo computes the same numbers on Keras's JAX backend as on TensorFlow's."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support import warm
from tests.support.models.strategies import relative
from tests.support.programs.backend_numbers import CASES, REMAT

BACKENDS = ("tensorflow", "jax")
# The weights that an initializer draws: Keras's backends draw by algorithms of their own.
DRAWN = re.compile(r"kernel|embeddings|/positions|/types")
KINDS = [*CASES, *(f"{name}+remat" for name in REMAT)]


def run(backend: str, *arguments: str, by=warm.run) -> str:
    """Returns what a Python on a backend prints."""
    # As on a machine without accelerators, and compiled in half the time.
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = {**os.environ, **quick, "KERAS_BACKEND": backend}
    command = [sys.executable, *arguments]
    done = by(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> list[dict[str, np.ndarray]]:
    """Returns the numbers of each backend; the second reads the weights that the first wrote."""
    folder = tmp_path_factory.mktemp("numbers")
    files = [str(folder / f"{backend}.npz") for backend in BACKENDS]
    for backend, file in zip(BACKENDS, files):
        run(
            backend,
            "-m",
            "tests.support.programs.backend_numbers",
            str(folder / "weights.npz"),
            file,
        )
    return [dict(np.load(file)) for file in files]


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_states_are_those_of_tensorflow(numbers, kind):
    expected, found = numbers
    names = [n for n in expected if n.startswith(f"{kind} ") and not n.endswith(" kept")]
    gradients = {n: expected[n] for n in names if " gradient " in n}
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    assert largest > 1e-3
    for name in (n for n in names if " initial " not in n):
        error = np.abs(found[name] - expected[name].astype("float64")).max()
        if name in gradients:
            assert error < 1e-5 * np.abs(expected[name]).max() + 1e-6 * largest, name
        else:
            assert relative(found[name], expected[name]) < 1e-6, name


@pytest.mark.parity
@pytest.mark.parametrize("name", REMAT)
def test_remat_keeps_less_for_the_backward_pass_on_jax(numbers, name):
    _, found = numbers
    assert found[f"{name}+remat training kept"] < 0.75 * found[f"{name} training kept"]


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_a_seed_gives_the_initial_weights_of_tensorflow_where_no_initializer_draws(numbers, name):
    expected, found = numbers
    initial = [n for n in expected if n.startswith(f"{name} initial ")]
    differing = {n for n in initial if not np.array_equal(expected[n], found[n])}
    zeros = {n for n in initial if not expected[n].any()}
    assert differing == {n for n in initial if DRAWN.search(n)} - zeros
    for n in differing:
        if expected[n].size > 500:  # of the same distribution, to five standard errors
            assert abs(found[n].std() / expected[n].std() - 1) < 5 / expected[n].size ** 0.5, n


@pytest.mark.parity
def test_stochastic_depth_draws_the_same(numbers):
    expected, found = numbers
    np.testing.assert_array_equal(found["draws"], expected["draws"])


TINY_LLAMA = """
import sys, warnings
import jax
import tftpu.models, tftpu.models.weights.loading
from tftpu.engines.objectives import (compiled, losses, objective, own, sums)
import tftpu.optim.losses, tftpu.optim.metrics
sizes = dict(layers=1, width=8, heads=1, kv_heads=1, hidden=8, vocabulary=8)
model = tftpu.models.build("llama_110m", attention="flash", remat="block", **sizes)
with warnings.catch_warnings(record=True) as warned:
    tokens = jax.ShapeDtypeStruct((2, 5), "int32")
    print(jax.eval_shape(lambda x: model(x, training=True), tokens).shape)
print(*{str(w.message) for w in warned}, sep="\\n")
print(model.count_params(), {"tensorflow", "jax"} & set(sys.modules))
"""


@pytest.mark.slow
def test_the_zoo_is_traced_on_jax_without_tensorflow_or_a_warning():
    # Embedding, attention, feed-forward and three norms.
    parameters = 8 * 8 + 4 * 8 * 8 + 3 * 8 * 8 + 3 * 8
    shape, warnings, printed = run("jax", "-c", TINY_LLAMA, by=subprocess.run).splitlines()
    assert shape == "(2, 5, 8)"
    assert printed == f"{parameters} {{'jax'}}"
    assert warnings == ""
