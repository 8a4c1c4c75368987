"""The candidates of a plan, and the lines of a config that they change."""

import dataclasses

import keras

from tftpu.config import Experiment, ModelConfig
from tftpu.input_pipelines.sources import Text
from tftpu.launch.plan.candidates import Candidate, Space
from tftpu.launch.settings import config_flags
from tftpu.tpu.slices import parse_slice


@dataclasses.dataclass
class Own(ModelConfig):
    def build(self):
        return keras.Sequential([keras.layers.Dense(1)])


def space_of(config, *overrides):
    fixed = {word.partition("=")[0].removeprefix("--config.") for word in overrides}
    return Space(config_flags.load(config, list(overrides)), fixed)


def candidates_of(space, name, blocks=True, statistics=False):
    return list(space.list_candidates(parse_slice(name), blocks, statistics))


def test_a_single_device_leaves_remat_microbatches_and_attention_to_choose():
    found = candidates_of(space_of("python_gpt"), "v5e-1")
    # What is recomputed with the kernel, and without it; divisors of 32.
    assert len(found) == len(set(found)) == (5 + 4) * 6
    assert {one.mesh for one in found} == {"data:1"}
    assert {one.microbatches for one in found} == {1, 2, 4, 8, 16, 32}


def test_every_candidate_trains_the_global_batch_of_the_config():
    for one in candidates_of(space_of("python_gpt"), "v5e-8"):
        tensor = [int(part[7:]) for part in one.mesh.split(",") if part.startswith("tensor:")]
        shards = 8 // (tensor or [1])[0]
        assert 32 % (shards * one.microbatches) == 0


def test_what_the_overrides_set_is_kept():
    space = space_of(
        "python_gpt",
        "--config.model.remat=block",
        "--config.model.attention=flash",
        "--config.train.gradient_accumulation_steps=2",
        "--config.cluster.mesh=fsdp:-1",
    )
    assert candidates_of(space, "v5e-4") == [Candidate("v5e-4", "fsdp:4", "block", 2, "flash")]


def test_the_tensorflow_engine_has_neither_meshes_nor_the_remats_of_jax():
    space = space_of("python_gpt", "--config.cluster.engine=tensorflow")
    found = candidates_of(space, "v5e-8")
    assert {one.mesh for one in found} == {""}
    assert {one.remat for one in found} == {"none", "block"}
    assert space.apply(found[0]).cluster.engine == "tensorflow"


def test_batch_statistics_of_a_microbatch_leave_the_microbatches_as_they_are():
    space = space_of("python_gpt", "--config.data.global_batch_size=64")
    found = candidates_of(space, "v5e-1", statistics=True)
    assert {one.microbatches for one in found} == {1}


def test_microbatches_hold_complete_groups_of_batch_statistics():
    found = candidates_of(space_of("digits_resnet", "--config.model.norm_batch=16"), "v5e-1")
    assert max(one.microbatches for one in found) * 16 == 128


def test_a_model_that_is_not_of_the_zoo_recomputes_by_train_remat():
    space = Space(Experiment(Own(), Text(global_batch_size=32)))
    assert {one.remat for one in candidates_of(space, "v5e-1", blocks=False)} == {"none"}
    found = candidates_of(space, "v5e-1")
    assert "train.remat=block" in {c for one in found for c in space.list_changes(one)}


def test_the_changes_make_the_candidate_when_they_are_given_as_overrides():
    space = space_of("python_gpt")
    one = Candidate("v5e-4", "data:2,fsdp:2", "block", 4, "flash")
    changes = [f"--config.{change}" for change in space.list_changes(one)]
    cluster = "--config.cluster.engine=jax"
    assert space.apply(one) == config_flags.load("python_gpt", [*changes, cluster])
    same = Candidate("v5e-1", "data:1", "none", 1, "plain")
    assert space.list_changes(same) == ["cluster.mesh=data:1", "model.attention=plain"]


def test_a_slice_that_cannot_divide_the_batch_says_why():
    space = space_of("python_gpt", "--config.data.global_batch_size=6")
    assert candidates_of(space, "v5e-4") != []  # the axis `tensor` does not divide it
    assert all("tensor" in one.mesh for one in candidates_of(space, "v5e-4"))
    space = space_of("python_gpt", "--config.data.global_batch_size=3")
    fixed = Space(space.experiment, {"cluster.mesh"})
    fixed.experiment.cluster.mesh = "fsdp:-1"
    assert candidates_of(fixed, "v5e-4") == []
    assert "cannot be divided" in fixed.explain_refusal(parse_slice("v5e-4"))


def test_a_given_mesh_that_does_not_fit_a_slice_is_why_it_has_no_candidate():
    space = space_of("python_gpt", "--config.cluster.mesh=fsdp:4")
    alone, four = parse_slice("v5e-1"), parse_slice("v5e-4")
    assert candidates_of(space, "v5e-1") == [] and candidates_of(space, "v5e-4")
    assert [target for target, _ in space.list_states([alone, four]).values()] == [four]
    assert "'fsdp:4' needs 4 devices" in space.explain_refusal(alone)


def test_the_settings_of_a_config_are_found_among_candidates_where_auto_is_any():
    def list_own(*overrides):
        space = Space(config_flags.load("python_gpt", list(overrides)))
        candidates = list(space.list_candidates(parse_slice("v5e-4"), True, False))
        own = [one for one in candidates if space.has_settings(one)]
        return own, candidates

    own, candidates = list_own()
    assert own == [one for one in candidates if one.remat == "none" and one.microbatches == 1]
    assert {one.attention for one in own} == {"plain", "flash"}
    given = "--config.model.remat=block", "--config.model.attention=flash"
    [only], _ = list_own(*given, "--config.cluster.mesh=fsdp:-1")
    assert only == Candidate("v5e-4", "fsdp:4", "block", 1, "flash")
    assert list_own("--config.cluster.mesh=fsdp:8")[0] == []  # of another slice
