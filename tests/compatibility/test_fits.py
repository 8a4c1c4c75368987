"""Scripts that call `fit`: `Trainer` returns, logs and trains what Keras does, or says why not."""

import json

import pytest

from tests.compatibility import fitting

ROUTES = [
    pytest.param("tensorflow", 1, id="tensorflow"),
    pytest.param("tensorflow", 4, id="four replicas", marks=pytest.mark.exhaustive),
    pytest.param("jax", 1, id="jax", marks=pytest.mark.exhaustive),
    pytest.param("jax", 4, id="mesh of four"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "devices"), ROUTES)
def test_fit_does_what_keras_does_or_is_refused_with_the_ways_out(backend, devices):
    printed, scripts = fitting.run(backend, devices), fitting.load()
    rows = {row["name"]: row for row in map(json.loads, printed.splitlines())}
    expected = {name for name, one in scripts.items() if one.on_jax or backend == "tensorflow"}
    assert rows.keys() == expected
    for name, row in rows.items():
        if (backend, devices) == ("tensorflow", 4) and scripts[name].one_device:
            assert "trains on one device only" in row["error"] and "engine='jax'" in row["error"]
        else:
            assert row.get("difference", 1.0) < 1e-5, row


def test_there_are_as_many_scripts_as_the_page_says():
    assert len(fitting.load()) >= 20
