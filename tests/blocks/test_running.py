"""Blocks or segments of other people's models are recomputed, and blocks run as a loop."""

import contextlib
import json

import keras
import pytest

import tftpu
from tests.support.models import blocks, zoo
from tests.support.programs import jax_process
from tftpu.blocks import running, segments, structure
from tftpu.blocks.running import check_blocks, count_input_bytes
from tftpu.errors import UserError
from tftpu.models.sizes import GPT


@pytest.mark.medium
def test_a_chain_is_found_by_its_graph_with_the_period_of_what_differs():
    model = blocks.build_chain()
    assert [block.scale for block in structure.find_blocks(model)] == pytest.approx(
        [0.2, 0.3] * 4 + [0.2]
    )
    (chain,) = structure.find_chains(model)
    assert (len(chain.blocks), chain.period) == (8, 2)
    assert [block.scale for block in chain.rest] == pytest.approx([0.2])


def test_blocks_inside_a_layer_are_found_and_make_no_chain():
    model = blocks.build_nested()
    assert len(structure.find_blocks(model)) == 3
    assert structure.find_chains(model) == []


def test_a_block_that_takes_another_argument_ends_a_chain():
    x = inputs = keras.Input((blocks.TIME, blocks.WIDTH))
    shifts = [keras.layers.Dense(blocks.WIDTH)(inputs) for _ in range(2)]
    for index in range(6):
        x = blocks.Block(1.0)(x, shift=shifts[index > 3])
    chains = structure.find_chains(keras.Model(inputs, x))
    assert [len(chain.blocks) for chain in chains] == [4, 2]


def test_a_graph_without_blocks_is_cut_where_the_fewest_numbers_are_kept():
    model = blocks.build_branching()
    inner, outer = segments.find_segments(model).values()
    ends = [(type(part.nodes[-1].operation).__name__, part.recomputed) for part in outer]
    whole = ("Sequential", False)  # whose own graph is cut
    sums = [("Add", True)] * 2
    assert ends == [*sums, ("BatchNormalization", True), sums[0], whole, ("Dense", True)]
    assert [len(part.inputs) for part in outer] == [1, 1, 1, 2, 1, 1]
    assert [len(part.nodes) for part in inner] == [1, 2]


def test_stages_of_one_class_are_blocks_where_no_graph_can_be_cut():
    class Stage(keras.layers.Layer):
        def __init__(self, width: int):
            super().__init__()
            self.dense = keras.layers.Dense(width)

        def call(self, x):
            return self.dense(x)

    class Stages(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.stages = [Stage(3), Stage(4)]

        def call(self, x):
            return self.stages[1](self.stages[0](x))

    x = keras.Input((2,))
    model = keras.Model(x, Stages()(x))
    assert not structure.find_blocks(model) and not segments.find_segments(model)
    assert len(structure.find_blocks(model, same_weights=False)) == 2
    check_blocks(model, "block", "none")


@pytest.mark.medium
@pytest.mark.parametrize("others", [0, 2])
def test_blocks_behind_a_loop_keep_what_they_compute_if_no_other_comes_behind_them(
    others, monkeypatch
):
    class Other(blocks.Block):
        pass

    x = inputs = keras.Input((blocks.TIME, blocks.WIDTH))
    shift = keras.layers.Dense(blocks.WIDTH)(inputs)
    for index in range(5):
        x = blocks.Block(0.2 + 0.1 * (index % 2))(x, shift=shift)
    for _ in range(others):
        x = keras.layers.Activation("tanh")(Other(0.1)(x, shift=shift))  # no chain
    model = keras.Model(inputs, x)
    replaced: list[int] = []

    @contextlib.contextmanager
    def replace(found):
        replaced.extend(found)
        yield

    monkeypatch.setattr(running.internals, "replacing_calls", replace)
    with running.running_blocks(model, "block", "block"):
        pass
    (chain,) = structure.find_chains(model)
    assert len(chain.rest) == 1
    assert (id(chain.rest[0]) in replaced) == bool(others)
    assert len(replaced) == 4 + bool(others) + others


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "nested", "branching"])
def test_recomputing_changes_no_number_on_tensorflow(name):
    """Nor draws of dropout, nor batch statistics, nor losses of layers."""
    assert blocks.compare(name, "block", "none") < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "count"),
    [
        (("chain",), 9),
        pytest.param(("nested", "branching"), 8, marks=pytest.mark.exhaustive),
        pytest.param(("gemma",), 9, marks=pytest.mark.exhaustive),
    ],
)
def test_recomputing_and_loops_change_no_number_on_jax(names, count):
    printed = jax_process.output("models.blocks", *names)
    cases = [json.loads(line) for line in printed.splitlines()]
    assert len(cases) == count
    for case in cases:
        assert case["difference"] < 5e-6, case
        if case["scan"] == "block":  # of 9 blocks, of which 8 are 4 groups
            assert case["length"] < (0.75 if case["remat"] == "none" else 0.9), case
            assert case["recomputed"] == 1, case  # a group; the last block keeps what it computes
        elif case["remat"] != "none":
            assert case["recomputed"], case
        assert case["offloads"] == (case["remat"] == "offload"), case


@pytest.mark.medium
def test_what_does_not_fit_the_model_is_refused():
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    with pytest.raises(UserError, match=r"has none: use train\.remat='none'"):
        check_blocks(plain, "block", "none")
    with pytest.raises(UserError, match=r"works only on the JAX engine.*train\.remat='block'"):
        check_blocks(blocks.build_chain(), "products", "none")
    with pytest.raises(UserError, match=r"set model\.remat instead"):
        check_blocks(zoo.compiled("gpt"), "block", "none")
    with pytest.raises(UserError, match=r"train\.remat.*'blok'"):
        tftpu.TrainConfig(remat="blok").validate()


@pytest.mark.medium
def test_the_inputs_of_blocks_are_counted_in_a_graph_and_in_the_zoo():
    # Of nine blocks in groups of two, eight are alike in pairs.
    assert count_input_bytes(blocks.build_chain(), 1) == 8 * blocks.TIME * blocks.WIDTH * 4
    assert count_input_bytes(blocks.build_branching(), 1) == 0
    config = GPT(name="gpt", vocabulary=9, context=12, layers=3, width=8, heads=2)
    tokens = 5
    assert count_input_bytes(tftpu.models.build(config), tokens) == 3 * tokens * 8 * 4
