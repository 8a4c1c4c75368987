"""The rules of a model for the mesh's `tensor` axis: what is wrong with one is said."""

import keras
import pytest
from jax.sharding import AbstractMesh

from tftpu.engines.jax.placement.sharding import Layout
from tftpu.errors import UserError

MESH = AbstractMesh((1, 1, 1, 4), ("data", "fsdp", "sequence", "tensor"))


def specs_of(*rules, units: int = 6) -> list[tuple]:
    """Returns the specs of a kernel of 8 x `units` and of its bias, by these rules."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)])
    model.sharding_rules = rules
    layout = Layout(MESH, model)
    return [tuple(layout.find_weight_sharding(v).spec) for v in model.variables]


def test_a_question_mark_leaves_what_cannot_be_divided_whole():
    assert specs_of(("kernel", ("tensor", "tensor?"))) == [("tensor", None), (None,)]


@pytest.mark.parametrize("axis", ["tensor", "tensor?"])
def test_a_rule_that_also_matches_a_variable_of_fewer_dimensions_names_it(axis):
    says = r"\(None, '.*'\).* 2 dimensions.*bias' has the shape \(8,\): .*instead of '\.'"
    with pytest.raises(UserError, match=says):
        specs_of((".", (None, axis)), units=8)


@pytest.mark.parametrize("axis", ["tensr", "tensr?"])
def test_an_axis_that_no_mesh_has_is_named(axis):
    with pytest.raises(UserError, match=r"kernel.* the axis 'tensr'.*Did you mean 'tensor'\?"):
        specs_of(("kernel", (axis, None)))


def test_a_dimension_that_the_axis_does_not_divide_is_named():
    with pytest.raises(UserError, match=r"of shape \(8, 6\), into 4 equal shards along 'tensor'"):
        specs_of(("kernel", (None, "tensor")))
