"""TFRecord shards with any features, arrays, generators and random numbers."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.data import data_sets
from tftpu import input_pipelines
from tftpu.engines.data.conversion import build_training
from tftpu.errors import UserError
from tftpu.input_pipelines import sources
from tftpu.input_pipelines.formats.manifest import Feature, parse_features
from tftpu.input_pipelines.sources import Records, Synthetic

FEATURES = {
    "x": Feature("float32", (2, 2)),
    "id": Feature("int64"),
    "tokens": Feature("uint16", (3,), "raw"),
    "y": Feature("int64", num_classes=3),
    "w": Feature("float32"),
}
SPEC = (
    *("x: float32[2,2]", "id: int64", "tokens: uint16[3] raw", "y: int64 num_classes=3"),
    "w: float32",
)


def example(i: int) -> dict:
    return {"x": np.full((2, 2), i), "id": i, "tokens": [i, 1, 2], "y": i % 3, "w": i / 2}


def write(folder, compression=""):
    parts = data_sets.split([example(i) for i in range(20)], 7, 0, 9, 4)
    data_sets.shards(folder, FEATURES, {"train": parts, "test": parts[:1]}, compression)
    return folder


def settings(folder, **changes) -> Records:
    given = {"data_dir": str(folder), "global_batch_size": 5, "shuffle": 6, "weight": "w"}
    data = Records(**{**given, "features": ("x", "id", "tokens"), **changes})
    data.validate()
    return data


def test_the_spec_describes_the_features():
    assert parse_features(SPEC) == FEATURES


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("sidecar", [True, False])
def test_shards_with_and_without_a_manifest_and_compressed(
    tmp_path, monkeypatch, compression, sidecar
):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    folder = write(tmp_path / "data", compression)
    data = settings(folder)
    if not sidecar:
        (folder / "dataset.json").unlink()
        data = settings(folder, spec=SPEC, compression=compression)
    pipeline = input_pipelines.training(data, 1)
    batches = pipeline.starting_at(0)
    assert batches.element_spec == input_pipelines.batch_spec(data, 5)
    ids = []
    for features, labels, weights in batches.take(8):
        found = features["id"].numpy()
        ids.append(found.tolist())
        assert features["x"].numpy().tolist() == [[[i, i], [i, i]] for i in found]
        assert features["tokens"].numpy().tolist() == [[i, 1, 2] for i in found]
        assert labels.numpy().tolist() == (found % 3).tolist()
        assert weights.numpy().tolist() == (found / 2).tolist()
    assert sorted(np.ravel(ids[:4])) == sorted(np.ravel(ids[4:])) == list(range(20))
    again = [features["id"].numpy().tolist() for features, _, _ in pipeline.starting_at(5).take(3)]
    assert again == ids[5:]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"features": ("x", "ide")}, "no feature 'ide'"),
        ({"spec": ("x: float33",)}, "Did you mean 'float32'"),
        ({"spec": ("x float32",)}, "cannot be read: write NAME: DTYPE"),
        ({"spec": ("x: float32",)}, "data.spec has no feature 'id'"),
        ({"train_split": "tain"}, "Did you mean 'train'"),
        ({"compression": "ZIP"}, "Did you mean 'GZIP'"),
    ],
)
def test_a_mistake_fails_with_a_clear_error(tmp_path, changes, message):
    write(tmp_path)
    with pytest.raises(UserError, match=message):
        input_pipelines.training(settings(tmp_path, **changes))


def test_files_without_a_manifest_need_a_spec_and_must_exist(tmp_path):
    with pytest.raises(UserError, match=r"describe its records in data\.spec"):
        input_pipelines.training(settings(tmp_path))
    with pytest.raises(UserError, match="nor a TFRecord file"):
        input_pipelines.training(settings(tmp_path, spec=SPEC))


def test_a_string_cannot_go_to_a_device(tmp_path):
    data_sets.shards(tmp_path, {"x": Feature("string")}, {"train": [[{"x": "a"}]]})
    with pytest.raises(UserError, match="'x' is a string, which no device supports"):
        input_pipelines.training(settings(tmp_path, features=("x",), label="", weight=""))


@pytest.mark.medium
def test_a_number_too_large_for_int32_is_named(tmp_path):
    features = {"x": Feature("int64")}
    data_sets.shards(tmp_path, features, {"train": [[{"x": 1 << 40}] * 5]})
    data = settings(tmp_path, features=("x",), label="", weight="")
    with pytest.raises(tf.errors.OpError, match=r"record 0 of .*'x' does not fit int32"):
        next(iter(input_pipelines.training(data).starting_at(0)))


def test_arrays_are_shuffled_and_resume_exactly():
    x = {"a": np.arange(10.0), "b": np.arange(10)}
    pipeline = input_pipelines.from_arrays(
        x, np.arange(10, dtype=np.int64), global_batch_size=4, seed=1
    )
    batches = list(pipeline.starting_at(0).take(10).as_numpy_iterator())
    assert batches[0][0]["a"].dtype == np.float32 and batches[0][1].dtype == np.int32
    stream = np.concatenate([labels for _, labels in batches])
    assert sorted(stream[:10]) == sorted(stream[10:20]) == list(range(10))
    for features, labels in batches:
        assert features["a"].tolist() == features["b"].tolist() == labels.tolist()
    again = next(pipeline.starting_at(6).as_numpy_iterator())[1]
    assert again.tolist() == batches[6][1].tolist()


@pytest.mark.parametrize(
    "arrays, message",
    [
        ((np.zeros(3), np.zeros(4)), "3, 4 examples"),
        ((np.zeros((0, 2)), np.zeros(0)), "at least one"),
        ((np.array(["a"]), np.zeros(1)), "No device supports"),
        ((np.array([1 << 40]), np.zeros(1)), "numbers that do not fit int32"),
    ],
)
def test_arrays_that_do_not_match_fail_with_a_clear_error(arrays, message):
    with pytest.raises(UserError, match=message):
        input_pipelines.from_arrays(*arrays, global_batch_size=2)


def test_a_generator_works_with_a_warning_that_it_is_slow(caplog):
    spec = (tf.TensorSpec((2,), tf.float32), tf.TensorSpec((), tf.int32))

    def make():
        for i in range(5):
            yield np.full(2, i, np.float32), i

    batches = input_pipelines.from_generator(make, spec, global_batch_size=4)
    assert "the TPU waits for its data" in caplog.text
    assert [y.numpy().tolist() for _, y in build_training(batches, 1).take(2)] == [
        [4, 0, 1, 2],
        [3, 4, 0, 1],
    ]
    with pytest.raises(
        UserError, match="must have a static shape, and a dtype that devices support"
    ):
        input_pipelines.from_generator(
            make, tf.TensorSpec((None,), tf.float32), global_batch_size=4
        )


def test_synthetic_data_of_any_spec():
    data = Synthetic(
        spec=("a: float32[3]", "t: int64[5] num_classes=7", "y: int32 num_classes=2"),
        features=("a", "t"),
        global_batch_size=4,
        examples=10,
    )
    data.validate()
    batches = input_pipelines.training(data).starting_at(0)
    assert batches.element_spec == input_pipelines.batch_spec(data, 4)
    features, labels = next(iter(batches))
    assert features["t"].numpy().max() < 7 and labels.numpy().max() < 2
    assert sum(len(y) for _, y in input_pipelines.evaluation(data)) == 10
    with pytest.raises(UserError, match="needs num_classes=N"):
        Synthetic(spec=("x: float32", "y: int32")).validate()


@pytest.mark.parametrize(
    "data",
    [
        sources.StreamedImages(format="folder", data_dir="none"),
        sources.StreamedImages(format="index", data_dir="none"),
        sources.StreamedImages(format="tfrecord", data_dir="none"),
        sources.StreamedImages(name="mnist", data_dir="none"),
        sources.Images(name="mnist", data_dir="none"),
        sources.Records(data_dir="none"),
        sources.Tokens(data_dir="none"),
        sources.Tokens(train_text="none/*.txt"),
        sources.Texts(train_text="none/*.csv"),
        sources.Texts(train_text=__file__, eval_text="none/*.csv"),
    ],
)
def test_missing_files_are_answered_with_the_flag_that_names_others(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    data.global_batch_size = 4
    [(name, _)] = [one for one in vars(data).items() if str(one[1]).startswith("none")]
    read = input_pipelines.evaluation if name == "eval_text" else input_pipelines.training
    with pytest.raises(UserError, match=rf"--config\.data\.{name}=(FOLDER|PATTERN)"):
        read(data)
