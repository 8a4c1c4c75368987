"""Weight files: loading, reports, and errors that load nothing."""

import dataclasses
import json
import os

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tftpu
from tests.support.fakes import fake_storage
from tests.support.models import zoo
from tftpu import models
from tftpu.checkpoint.store import Checkpoints
from tftpu.engines.leaf import Leaf
from tftpu.engines.tensorflow.leaves import build_leaves
from tftpu.models.weights import files as weight_files
from tftpu.models.weights import loading
from tftpu.storage import files, regions

FAMILIES = [name for name in zoo.TINY if name not in ("efficientnetv2", "vit_mean")]


def build(family: str, seed: int, **fields) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = zoo.build(family, **fields)
    for variable in model.weights:
        variable.assign(variable + keras.random.uniform(variable.shape, 0.0, 0.5))
    return model


def values(model: keras.Model) -> dict[str, np.ndarray]:
    return {v.path: v.numpy() for v in model.weights}


def assert_same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for path in first:
        np.testing.assert_array_equal(first[path], second[path], err_msg=path)


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_weights_are_loaded(family, tmp_path):
    saved, model = build(family, 1), build(family, 2)
    models.save_weights(saved, tmp_path / "model.safetensors")
    report = models.load_weights(model, tmp_path)  # a folder
    assert_same(values(model), values(saved))
    assert report.loaded == [v.path for v in model.weights]
    assert not (report.missing or report.unused or report.replaced)


@pytest.fixture(scope="module")
def _bucket():
    with (
        fake_storage.serving() as service,
        fake_storage.in_this_process({"STORAGE_EMULATOR_HOST": service.url}),
    ):
        yield


@pytest.mark.medium
@pytest.mark.usefixtures("_bucket")
def test_weights_in_a_bucket_are_loaded():
    saved, model = build("llama", 1), build("llama", 2)
    models.save_weights(saved, "gs://bucket/weights/model.safetensors")
    models.load_weights(model, "gs://bucket/weights/model.safetensors")
    assert_same(values(model), values(saved))


@pytest.mark.medium
@pytest.mark.usefixtures("_bucket")
def test_of_a_remote_file_one_array_at_a_time_is_read(monkeypatch):
    saved, model = build("llama", 1), build("llama", 2)
    models.save_weights(saved, "gs://bucket/one/model.safetensors")
    counts = []

    def read_range(path, first, count):
        counts.append(count)
        return download(path, first, count)

    download = files.read_range
    monkeypatch.setattr(files, "read_range", read_range)
    monkeypatch.setattr(files, "read", lambda _: pytest.fail("the whole file was read"))
    models.load_weights(model, "gs://bucket/one/model.safetensors")
    assert_same(values(model), values(saved))
    assert sorted(counts[2:]) == sorted(4 * v.size for v in values(saved).values())


@pytest.mark.medium
@pytest.mark.usefixtures("_bucket")
@pytest.mark.parametrize("damage", ["truncated", "header", "longer", "empty"])
def test_a_damaged_remote_file_loads_nothing(damage):
    model = build("gpt", 1)
    models.save_weights(build("gpt", 2), "gs://bucket/damaged/model.safetensors")
    data = files.read("gs://bucket/damaged/model.safetensors")
    damaged = {"truncated": data[:-4], "header": data[:8] + b"?" + data[9:], "empty": b""}
    files.write_whole("gs://bucket/damaged/w.safetensors", damaged.get(damage, data + b"1234"))
    before = values(model)
    with pytest.raises(tftpu.UserError, match="cannot be read"):
        models.load_weights(model, "gs://bucket/damaged/w.safetensors")
    assert_same(values(model), before)


@pytest.mark.usefixtures("_bucket")
def test_a_remote_file_that_disappears_is_said():
    path = "gs://bucket/gone/model.safetensors"
    models.save_weights(build("gpt", 2), path)
    found = weight_files.read(path)
    files.remove(path)
    with pytest.raises(tftpu.UserError, match=r"'transformer\.wte\.weight' cannot be read"):
        found["transformer.wte.weight"].content()


@pytest.mark.medium
def test_a_checkpoint_of_tftpu_is_loaded(tmp_path):
    saved, model = build("resnet", 1), build("resnet", 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, build_leaves({"model": saved.weights}), {})
    checkpoints.wait()
    report = models.load_weights(model, tmp_path / "checkpoints" / "7")
    assert not (report.missing or report.unused)
    assert_same(values(model), values(saved))


def in_halves(leaf: Leaf) -> Leaf:
    """Returns a leaf that writes the two halves of its first dimension apart, if it can."""
    size = leaf.shape[0] if leaf.shape else 1
    if size % 2:
        return leaf
    [whole] = leaf.held
    halves = [((0, size // 2), *whole[1:]), ((size // 2, size), *whole[1:])]
    return dataclasses.replace(
        leaf, written=tuple(halves), read=lambda r: leaf.read(whole)[regions.to_slices(r)]
    )


@pytest.mark.medium
def test_a_checkpoint_of_parts_is_loaded(tmp_path):
    saved, model = build("gpt", 1), build("gpt", 2)
    leaves = build_leaves({"model": saved.weights})["model"]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, {"model": [in_halves(leaf) for leaf in leaves]}, {})
    checkpoints.wait()
    folder = tmp_path / "checkpoints" / "7"
    assert len(load_file(folder / "model.safetensors")) > 1.5 * len(leaves)
    report = models.load_weights(model, folder)
    assert not (report.missing or report.unused)
    assert_same(values(model), values(saved))


@pytest.mark.medium
@pytest.mark.usefixtures("_bucket")
@pytest.mark.parametrize("damage", ["truncated", "header", "index", "empty"])
def test_a_damaged_file_loads_nothing(damage, tmp_path):
    model = build("gpt", 1)
    path = tmp_path / "model.safetensors"
    models.save_weights(build("gpt", 2), path)
    data = path.read_bytes()
    if damage == "index":
        place = {"weight_map": {"transformer.wte.weight": path.name, "lost": path.name}}
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(json.dumps(place))
    else:
        path.write_bytes(
            {"truncated": data[:-4], "header": data[:8] + b"?" + data[9:], "empty": b""}[damage]
        )
    before = values(model)
    with pytest.raises(tftpu.UserError, match="cannot be read"):
        models.load_weights(model, path)
    assert_same(values(model), before)


def test_a_pipe_that_an_index_names_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "part.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "part.safetensors"}}))
    with pytest.raises(tftpu.UserError, match=r"part\.safetensors is not a regular"):
        models.load_weights(build("gpt", 1), index)


@pytest.mark.medium
def test_a_wrong_shape_loads_nothing_and_names_the_variable(tmp_path):
    models.save_weights(build("llama", 1, hidden=48), tmp_path / "model.safetensors")
    model = build("llama", 2)
    before = values(model)
    with pytest.raises(tftpu.UserError) as said:
        models.load_weights(model, tmp_path)
    assert "6 shapes differ" in str(said.value)
    assert (
        "block1_gate/kernel (16, 32) here, model.layers.0.mlp.gate_proj.weight (48, 16) there"
        in str(said.value)
    )
    assert_same(values(model), before)


@pytest.mark.medium
def test_an_array_of_another_rank_is_a_mismatch(tmp_path):
    path = tmp_path / "model.safetensors"
    models.save_weights(build("vit", 1), path)
    arrays = load_file(path)
    arrays["vit.embeddings.patch_embeddings.projection.weight"] = np.zeros((16, 48), np.float32)
    save_file(arrays, path)
    with pytest.raises(tftpu.UserError, match=r"patches/kernel \(4, 4, 3, 16\) here"):
        models.load_weights(build("vit", 2), path)


@pytest.mark.medium
def test_the_report_names_both_sides(tmp_path):
    path = tmp_path / "model.safetensors"
    models.save_weights(build("bert", 1), path)
    arrays = load_file(path)
    del arrays["cls.predictions.transform.dense.bias"]
    arrays["cls.seq_relationship.bias"] = np.zeros(2, np.float32)
    arrays["bert.embeddings.position_ids"] = np.arange(12)  # a buffer: nothing is lost
    save_file(arrays, path)
    model = build("bert", 2)
    before = values(model)
    report = models.load_weights(model, path)
    assert report.missing == ["head_transform/bias"]
    assert report.unused == ["cls.seq_relationship.bias"]
    assert len(report.loaded) == len(model.weights) - 1
    after = values(model)["head_transform/bias"]
    np.testing.assert_array_equal(after, before["head_transform/bias"])
    assert str(report) == (
        f"{len(report.loaded)} variables loaded; 1 not loaded, because the file lacks them: "
        "head_transform/bias; 1 of the file's arrays not used: cls.seq_relationship.bias"
    )


@pytest.mark.slow
def test_the_older_names_of_bert_and_gpt_are_known(tmp_path):
    for family, change in (
        ("bert", lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma")),
        ("bert", lambda n: n.replace("LayerNorm.bias", "LayerNorm.beta")),
        ("gpt", lambda n: n.removeprefix("transformer.")),
    ):
        saved, model = build(family, 1), build(family, 2)
        models.save_weights(saved, tmp_path / "model.safetensors")
        arrays = load_file(tmp_path / "model.safetensors")
        save_file({change(n): a for n, a in arrays.items()}, tmp_path / "old.safetensors")
        report = models.load_weights(model, tmp_path / "old.safetensors")
        assert not (report.missing or report.unused)
        assert_same(values(model), values(saved))


@pytest.mark.medium
def test_a_head_of_another_shape_fails_or_keeps_its_values(tmp_path):
    models.save_weights(build("convnext", 1), tmp_path / "model.safetensors")
    model = build("convnext", 2, num_classes=3)
    before = values(model)
    with pytest.raises(tftpu.UserError, match="2 shapes differ"):
        models.load_weights(model, tmp_path)
    report = models.load_weights(model, tmp_path, replace_head=True)
    assert report.replaced == ["head/kernel", "head/bias"]
    after = values(model)
    for path in before:
        assert (before[path] == after[path]).all() == path.startswith("head/")


@pytest.mark.slow
def test_a_file_that_cannot_be_loaded_or_saved_fails_with_the_reason(tmp_path):
    models.save_weights(build("gpt", 1), tmp_path / "gpt.safetensors")
    for model, path, said in (
        (build("gpt", 1), tmp_path / "no.safetensors", "There is no weight file"),
        (build("gpt", 1), tmp_path, "nor a folder with model.safetensors"),
        (build("gpt", 1), tmp_path / "no.h5", "There is no weight file"),
        (build("vit", 1), tmp_path / "gpt.safetensors", "belong to another family"),
        (build("efficientnetv2", 1), tmp_path / "gpt.safetensors", "has no model like"),
        (keras.Sequential(), tmp_path / "gpt.safetensors", "not built by tftpu.models.build"),
    ):
        with pytest.raises(tftpu.UserError, match=said):
            models.load_weights(model, path)
    with pytest.raises(tftpu.UserError, match="no model like 'efficientnetv2'"):
        models.save_weights(build("efficientnetv2", 1), tmp_path / "e.safetensors")
    with pytest.raises(tftpu.UserError, match="no format 'tensors'"):
        models.save_weights(build("gpt", 1), tmp_path / "e.safetensors", format="tensors")


def test_frozen_weights_are_those_that_the_patterns_name():
    model = build("resnet", 1)
    frozen = loading.freeze(model, "stem*, stage1_block1_*_norm/gamma")
    trainable = {v.path for v in model.trainable_variables}
    assert "stem_conv/kernel" in frozen and "stage1_block1_conv_norm/gamma" in frozen
    assert "stage1_block1_conv_norm/beta" in trainable
    assert not trainable.intersection(frozen)
    assert trainable.union(frozen) >= {v.path for v in model.weights if "moving" not in v.path}
    # A fully frozen norm uses its moving statistics, a partly frozen one the batch's.
    layer = model.get_layer("stem_norm")
    x = np.random.default_rng(0).normal(size=(4, 3, 3, 8)).astype("float32")
    np.testing.assert_array_equal(layer(x, training=True), layer(x, training=False))
    other = model.get_layer("stage1_block1_conv_norm")
    assert abs(other(x, training=True).numpy() - other(x, training=False).numpy()).max() > 0.1


@pytest.mark.medium
def test_patterns_that_freeze_nothing_or_everything_fail():
    with pytest.raises(tftpu.UserError, match="no variable matches 'stm"):
        loading.freeze(build("resnet", 1), "stem*,stm*")
    with pytest.raises(tftpu.UserError, match="leaves nothing to train"):
        loading.freeze(build("resnet", 1), "*")
