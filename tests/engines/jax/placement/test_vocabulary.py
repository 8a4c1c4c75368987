"""Tables of a vocabulary stay sharded in a step, and change no number."""

import json

import keras
import pytest
from jax.sharding import AbstractMesh

from tests.support.programs import jax_process
from tftpu.config.mesh import AXES, parse_mesh
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.engines.jax.placement.vocabulary import ROWS_PER_TOKEN, find_tables

CLASSES = 6144
TABLES = ["embedding/embeddings", "head/kernel"]


@pytest.fixture(scope="module")
def model() -> keras.Model:
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(CLASSES, 16, name="embedding")(inputs)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x))


@pytest.mark.parametrize(
    ("mesh", "tokens", "found"),
    [
        ("fsdp:8", (16, 4), TABLES),
        ("fsdp:8", (CLASSES // ROWS_PER_TOKEN, 1), TABLES),
        ("fsdp:8", (CLASSES // ROWS_PER_TOKEN + 1, 1), []),
        # A device gets the tokens of the devices along `fsdp` alone.
        ("data:2,fsdp:4", (2 * CLASSES // ROWS_PER_TOKEN, 1), TABLES),
        ("data:8", (16, 4), []),
        ("tensor:2,fsdp:4", (16, 4), []),
        ("fsdp:5", (16, 4), []),  # does not divide the classes
    ],
)  # fmt: skip
def test_the_tables_of_a_vocabulary_are_found_where_tokens_are_fewer(model, mesh, tokens, found):
    sizes = {**dict.fromkeys(AXES, 1), **parse_mesh(mesh)}
    layout = Layout(AbstractMesh(tuple(sizes.values()), tuple(sizes)), model)
    assert [v.path for v in find_tables(layout, model.variables, (*tokens, CLASSES))] == found
    assert not find_tables(layout, model.variables, (*tokens, CLASSES + 1))


@pytest.mark.slow
def test_sharded_tables_change_no_number():
    cases = [json.loads(line) for line in jax_process.output("models.vocabulary").splitlines()]
    assert len(cases) == 12
    for case in cases:
        assert case["difference"] < 2e-6, case
        tables = ["model/embedding/embeddings", "model/head/kernel"][: 1 if case["tied"] else 2]
        assert case["by_token"] == (case["time"] > 4), case
        assert case["tables"] == ([] if "tensor" in case["mesh"] else tables), case
