"""Predictions in shards: every record once, whatever ends a process, on any devices."""

import json

import keras
import numpy as np
import pytest

import tftpu
from tests.support.data import data_sets
from tests.support.models.strategies import mlp
from tests.support.models.training import make_trainer
from tests.support.predictions import COUNT, X, job, of_known_weights, records, trainer_of
from tests.support.programs import jax_process
from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.inference.predict import predict
from tftpu.inference.prediction.outputs import add_embedding, build_columns, has_probabilities
from tftpu.input_pipelines import unlabelled
from tftpu.input_pipelines.formats import results
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.sources import Records
from tftpu.storage import files


def rows(folder) -> list[dict]:
    found = sorted(path for path in folder.iterdir() if path.name.startswith("predictions-"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


def content(folder) -> dict[str, bytes]:
    """Returns the files by name, without those that no reader of predictions looks at."""
    own = (".lock", ".sums-")
    return {p.name: p.read_bytes() for p in folder.glob("*") if not p.name.startswith(own)}


@pytest.mark.parametrize("batch", [16, 7, 100])
def test_every_record_once_with_the_values_of_the_trainer(tmp_path, batch):
    trainer, reported = trainer_of(), []
    assert predict(
        trainer, records(batch), job(tmp_path, keep=["place"]), lambda *n: reported.append(n)
    )
    found = rows(tmp_path)
    assert [row["record"] for row in found] == list(range(COUNT))
    assert {row["file"] for row in found} == {"x"}
    assert [row["place"] for row in found] == [2 * n for n in range(COUNT)]
    np.testing.assert_allclose([row["logits"] for row in found], trainer.predict(X), atol=1e-6)
    assert reported == [(0, 96), (20, 96), (40, 96), (60, 96), (80, 96), (96, 96)]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [shard["records"] for shard in manifest["shards"]] == [20, 20, 20, 20, 16]
    assert manifest["of"] == "x" and manifest["records"] == COUNT


def test_records_whose_outputs_are_not_finite_are_counted(tmp_path, caplog):
    trainer = trainer_of()
    predict(trainer, records(), job(tmp_path / "finite"))
    assert not caplog.messages

    def columns(outputs):
        logits = np.array(outputs)
        logits[[3, 7], 0] = np.nan, np.inf
        return {"logits": logits}

    held = {"jsonl": "null", "csv": "empty cells, or as null in lists"}
    held |= dict.fromkeys(("tfrecord", "parquet"), "NaN or infinity")
    for form in held:
        encode = getattr(results, form)
        wrong = job(tmp_path / form, format=form, encode=encode, columns=columns)
        predict(trainer, records(), wrong)
    for said, as_what in zip(caplog.messages, held.values(), strict=True):
        # 2 in each of 5 shards
        assert said.startswith("10 records that were written now have outputs that are not finite")
        assert "first record 3 of" in said
        assert said.endswith(f"; the files hold them as {as_what}.")


@pytest.mark.medium
def test_a_disk_that_fails_at_any_shard_leaves_whole_shards_that_are_kept(tmp_path, monkeypatch):
    trainer, write_whole = trainer_of(), files.write_whole
    predict(trainer, records(), job(tmp_path / "whole"))
    whole = content(tmp_path / "whole")
    for n in range(1, 9):  # the plan, the sums, five shards, the manifest
        count = []

        def failing(path, data, n=n, count=count):
            count.append(path)
            if len(count) == n:
                raise OSError(28, "No space left on device")
            write_whole(path, data)

        folder = tmp_path / str(n)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(files, "write_whole", failing)
            predict(trainer, records(), job(folder))
        assert "manifest.json" not in content(folder)
        before = {name: (folder / name).stat().st_mtime_ns for name in content(folder)}
        assert content(folder).items() <= whole.items()
        predict(trainer, records(), job(folder))
        assert content(folder) == whole
        kept = {name: (folder / name).stat().st_mtime_ns for name in before}
        assert kept == before, "a shard that was there was written again"


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    trainer = trainer_of()
    predict(trainer, records(), job(tmp_path))
    whole = content(tmp_path)
    (tmp_path / "predictions-00001-of-00005.jsonl").unlink()
    for name in "predictions-00001-of-00005.jsonl", "plan.json", ".sums-1-of-1.crc":
        (tmp_path / f".{name}.4711.tmp").write_bytes(b"{")
    predict(trainer, records(), job(tmp_path))
    assert content(tmp_path) == whole
    assert not list(tmp_path.glob(".*.tmp"))


def test_machines_share_the_ranges_and_the_last_one_writes_the_manifest(tmp_path):
    trainer = trainer_of()
    assert not predict(trainer, records(), job(tmp_path, machine=(2, 3)))
    assert not predict(trainer, records(), job(tmp_path, machine=(1, 3)))
    assert sorted(content(tmp_path))[1:] == [
        f"predictions-0000{n}-of-00005.jsonl" for n in (0, 1, 3, 4)
    ]
    assert predict(trainer, records(), job(tmp_path, machine=(3, 3)))
    assert [row["record"] for row in rows(tmp_path)] == list(range(COUNT))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan": {"of": "y"}}, "already holds other .* of = 'x'; now it is 'y'"),
        ({"records_per_shard": 10}, "each of their files has 20 records, not 10"),
        ({"machine": (1, 2)}, "shared by 1 machines, not 2"),
        ({"keep": ["place"]}, "kept fields are none, not place"),
        ({"keep": ["plaice"]}, "no field 'plaice'"),
    ],
)
def test_a_folder_holds_the_predictions_of_one_plan(tmp_path, changes, named):
    trainer = trainer_of()
    predict(trainer, records(), job(tmp_path))
    before = content(tmp_path)
    with pytest.raises(UserError, match=named):
        predict(trainer, records(), job(tmp_path, **changes))
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["file", "record", "error", "logits"])
def test_a_kept_field_with_the_name_of_a_column_is_refused(tmp_path, name):
    fields = {name: np.arange(COUNT)}
    given = unlabelled.from_arrays(X, DataContext(0, 16), "x", fields)
    with pytest.raises(UserError, match=f"field '{name}' has the name of a column.*rename it"):
        # Without the columns of the model, the names that all predictions have are known.
        predict(trainer_of() if name == "logits" else None, given, job(tmp_path, keep=[name]))
    assert not any(file.startswith("predictions-") for file in content(tmp_path))


def test_a_folder_without_predictions_is_free(tmp_path, monkeypatch):
    with monkeypatch.context() as failing:
        failing.setattr(files, "write_whole", fails_after_the_plan(files.write_whole))
        with pytest.raises(OSError, match="full"):
            predict(trainer_of(), records(), job(tmp_path))
    assert sorted(content(tmp_path)) == ["plan.json"]
    with pytest.raises(UserError, match=r"were begun in .*, but none is written.*by 1 machines"):
        predict(trainer_of(), records(), job(tmp_path, machine=(1, 2)))
    assert predict(trainer_of(), records(), job(tmp_path, plan={"of": "y"}))
    assert json.loads((tmp_path / "plan.json").read_text())["of"] == "y"
    assert [row["record"] for row in rows(tmp_path)] == list(range(COUNT))


def fails_after_the_plan(write):
    def write_plan(path, data):
        if not path.endswith("plan.json"):
            raise OSError("full")
        write(path, data)

    return write_plan


def test_a_changed_input_is_told_without_its_checksum(tmp_path):
    predict(trainer_of(), records(), job(tmp_path, plan={"identity": "3a6e"}))
    with pytest.raises(UserError, match="the input's files have changed since") as said:
        predict(trainer_of(), records(), job(tmp_path, plan={"identity": "2f3d"}))
    assert "3a6e" not in str(said.value)


def test_a_damaged_plan_is_named(tmp_path):
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        predict(trainer_of(), records(), job(tmp_path))


@pytest.mark.medium
@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_many_devices_give_the_same_files(tmp_path, devices):
    keras.utils.set_random_seed(0)
    predict(trainer_of(), records(batch=12), job(tmp_path / "one"))
    with tftpu.connect("none", devices).scope():
        keras.utils.set_random_seed(0)
        trainer = trainer_of(mlp())
    predict(trainer, records(batch=12), job(tmp_path / "many"))
    one, many = rows(tmp_path / "one"), rows(tmp_path / "many")
    assert [row["record"] for row in one] == [row["record"] for row in many]
    np.testing.assert_allclose(
        [row["logits"] for row in one], [row["logits"] for row in many], atol=1e-5
    )


@pytest.mark.slow
def test_records_of_shards_are_named_by_file_and_number(tmp_path):
    features = {
        "x": Feature("float32", X.shape[1:]),
        "y": Feature("int64"),
        "id": Feature("string"),
    }
    made = [{"x": x, "y": n, "id": f"number {n}"} for n, x in enumerate(X[:50])]
    data_sets.shards(tmp_path / "data", features, {"test": data_sets.split(made, 7, 30, 13)})
    data = Records(data_dir=str(tmp_path / "data"), global_batch_size=8)
    trainer = trainer_of()
    for address in ("evaluation", f"tfrecord:{tmp_path}/data", f"tfrecord:{tmp_path}/data:test"):
        found = data.prediction(address, DataContext(0, 8))
        folder = tmp_path / str(len(address))
        predict(trainer, found, job(folder, keep=["id", "y"], plan={}))
        written = rows(folder)
        assert [row["id"] for row in written] == [f"number {n}" for n in range(50)]
        places = [(row["file"].rpartition("/")[2], row["record"]) for row in written]
        sizes = enumerate((7, 30, 13))
        assert places == [(f"test-0000{k}", n) for k, size in sizes for n in range(size)]
        values = [row["logits"] for row in written]
        np.testing.assert_allclose(values, trainer.predict(X[:50]), atol=1e-6)


def test_classes_top5_and_embedding_agree_with_the_model(tmp_path):
    model = keras.Sequential(
        [keras.Input(X.shape[1:]), keras.layers.Dense(8, "relu"), keras.layers.Dense(7)]
    )
    names = [f"class {n}" for n in range(7)]
    columns = build_columns(["classes", "top5", "embedding"], has_probabilities(model), names)
    changed = add_embedding(model)
    changed.compile("sgd")
    predict(make_trainer(changed), records(), job(tmp_path, columns=columns))
    logits = model.predict(X, verbose=0)
    probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(logits))
    found = rows(tmp_path)
    assert [row["class"] for row in found] == logits.argmax(-1).tolist()
    assert [row["class_name"] for row in found] == [names[n] for n in logits.argmax(-1)]
    np.testing.assert_allclose(
        [row["probability"] for row in found], probabilities.max(-1), rtol=1e-5
    )
    best = np.sort(probabilities, -1)[:, ::-1][:, :5]
    np.testing.assert_allclose([row["top5_probabilities"] for row in found], best, rtol=1e-5)
    assert [row["top5_names"][0] for row in found] == [row["class_name"] for row in found]
    weights, bias = model.layers[-1].get_weights()
    again = np.array([row["embedding"] for row in found]) @ weights + bias
    np.testing.assert_allclose(again, logits, atol=1e-5)


def test_a_model_of_probabilities_is_not_normalized_twice():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    assert has_probabilities(model)
    scores = np.array([[0.7, 0.2, 0.1]], np.float32)
    [probability] = build_columns(["classes"], True, None)(scores)["probability"]
    assert probability == np.float32(0.7)


def test_the_loss_says_what_the_outputs_are():
    inputs = keras.Input((3,))
    both = [keras.layers.Dense(3, "softmax")(inputs) for _ in range(2)]
    model = keras.Model(inputs, keras.layers.Average()(both))
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert has_probabilities(model)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert not has_probabilities(model)
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    with pytest.raises(UserError, match="ask for logits"):
        has_probabilities(model)


def test_data_that_end_early_are_named(tmp_path):
    class Shorter:
        def __init__(self):
            self._trainer = trainer_of()

        def predict_batches(self, x):
            return self._trainer.predict_batches(x.take(3))

    with pytest.raises(UserError, match="ended before record 48 of 96"):
        predict(Shorter(), records(), job(tmp_path, records_per_shard=96))


def test_a_single_score_has_no_class():
    with pytest.raises(UserError, match="ask for logits"):
        build_columns(["classes"], False, None)(np.zeros((4, 1), np.float32))


@pytest.mark.slow
def test_jax_writes_the_same_on_two_devices(tmp_path):
    jax_process.output("programs.jax_predictions", str(tmp_path))
    expected = of_known_weights(mlp()).predict(X, verbose=0)
    found = rows(tmp_path)
    assert [row["record"] for row in found] == list(range(COUNT))
    np.testing.assert_allclose([row["logits"] for row in found], expected, rtol=1e-5, atol=1e-5)
