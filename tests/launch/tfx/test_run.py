"""`run_fn` of TFX's Trainer, on what tf.Transform makes; the whole pipeline is outside CI."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compatibility.tfx import flowers
from tests.compatibility.tfx.user import iris_fields
from tftpu.errors import UserError
from tftpu.launch.main import main
from tftpu.launch.tfx import Examples, base, features, reading, run_fn

# Installed without what it asks for, which is another TensorFlow: see the Makefile. Its import sets
# a variable of the environment, for the tests of other files as well.
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("tensorflow_transform"), reason="no tensorflow_transform here"
)

ROWS = flowers.rows()
TRAIN, HELD = ROWS[::3] + ROWS[1::3], ROWS[2::3]
SPEC = {name: tf.io.FixedLenFeature([1], tf.float32) for name in flowers.COLUMNS} | {
    name: tf.io.FixedLenFeature([1], tf.string) for name in ("field", "species")
}
CONFIG = iris_fields.__file__


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Path:
    """Makes examples, raw and transformed, a schema and a transform graph, as TFX lays them out."""
    import tensorflow_transform.beam as tft_beam
    from google.protobuf import text_format
    from tensorflow_transform.tf_metadata import dataset_metadata, metadata_io, schema_utils

    folder = tmp_path_factory.mktemp("artifacts")
    schema = schema_utils.schema_from_feature_spec(SPEC)
    (folder / "schema.pbtxt").write_text(text_format.MessageToString(schema))
    described = dataset_metadata.DatasetMetadata(schema)
    graph = str(folder / "graph")
    with tft_beam.Context(temp_dir=str(folder / "beam")):
        made = (arrays(TRAIN), described) | tft_beam.AnalyzeAndTransformDataset(
            iris_fields.preprocessing_fn
        )
        (train, _), function = made
        function | tft_beam.WriteTransformFn(graph)
        held, _ = ((arrays(HELD), described), function) | tft_beam.TransformDataset()
    metadata_io.write_metadata(described, f"{graph}/metadata")
    for kind, splits in {"raw": (TRAIN, HELD), "transformed": (train, held)}.items():
        for split, rows in zip(("train", "eval"), splits):
            plain = [{n: np.ravel(v)[0] for n, v in row.items()} for row in rows]
            for part, some in enumerate(([], plain[::2], plain[1::2])):  # shards may be empty
                write(folder / kind / f"Split-{split}" / f"{part}.gz", some)
    return folder


def arrays(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {n: np.array([v.encode() if isinstance(v, str) else v]) for n, v in row.items()}
        for row in rows
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path), "GZIP") as file:
        for row in rows:
            file.write(flowers.serialized(row))


def fn_args(artifacts: Path, out: Path, **changed: Any) -> Any:
    """Returns the attributes of TFX's `FnArgs`, as its Trainer fills them in."""
    given: dict[str, Any] = {
        "working_dir": None,
        "train_files": [str(artifacts / "transformed/Split-train/*")],
        "eval_files": [str(artifacts / "transformed/Split-eval/*")],
        "train_steps": 40,
        "eval_steps": None,
        "schema_path": str(artifacts / "schema.pbtxt"),
        "transform_graph_path": str(artifacts / "graph"),
        "data_accessor": SimpleNamespace(data_view_decode_fn=None),
        "serving_model_dir": str(out / "Format-Serving"),
        "eval_model_dir": str(out / "Format-TFMA"),
        "model_run_dir": str(out / "run"),
        "base_model": None,
        "hyperparameters": None,
        "custom_config": {"config": CONFIG},
    }
    given |= {"schema_file": given["schema_path"], "transform_output": given["schema_path"]}
    assert not set(changed) - set(given)
    return SimpleNamespace(**(given | changed))


def raw(artifacts: Path) -> dict[str, list[str]]:
    return {f"{s}_files": [str(artifacts / f"raw/Split-{s}/*")] for s in ("train", "eval")}


def served(out: Path, rows: list[dict[str, Any]], without: str = "species") -> np.ndarray:
    """Returns the outputs of the SavedModel for raw examples that lack the label."""
    signature = tf.saved_model.load(str(out / "Format-Serving")).signatures["serving_default"]
    given = tf.constant([flowers.serialized(row, without) for row in rows])
    return signature(examples=given)["logits"].numpy()


def weights_of(out: Path, model: keras.Model) -> dict[str, np.ndarray]:
    model.load_weights(str(out / "Format-Serving" / base.WEIGHTS))
    return {v.path: v.numpy() for v in model.weights}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(artifacts, tmp_path_factory) -> Path:
    """Trains on transformed examples; overrides and hyperparameters set fields."""
    out = tmp_path_factory.mktemp("trained")
    custom = {"config": CONFIG, "overrides": {"model.width": 8, "train.eval_every": 0}}
    tuned = {"optimizer.learning_rate": 0.05, "tuner/epochs": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("/")  # which restores the path at the end
        given = {"custom_config": custom, "hyperparameters": {"space": [], "values": tuned}}
        run_fn(fn_args(artifacts, out, **given))
    return out


@pytest.mark.slow
def test_the_saved_model_takes_raw_examples_without_labels_and_computes_what_numpy_does(trained):
    weights = weights_of(trained, iris_fields.Classifier(width=8).build())
    expected = flowers.logits_by_hand(HELD, TRAIN, weights)
    np.testing.assert_allclose(served(trained, HELD), expected, atol=1e-5)
    species = flowers.numbers(TRAIN, "species")
    accuracy = np.mean(expected.argmax(1) == [species[row["species"]] for row in HELD])
    last = [line for line in lines(trained) if line["split"] == "eval"][-1]
    assert (last["step"], last["accuracy"]) == (40, pytest.approx(accuracy))
    assert accuracy > 0.6  # three species; Beam gives the examples in another order each time


@pytest.mark.slow
def test_the_evaluator_gets_the_transformed_features_with_the_label(trained):
    signatures = tf.saved_model.load(str(trained / "Format-Serving")).signatures
    given = tf.constant([flowers.serialized(row) for row in HELD])
    found = signatures["transform_features"](examples=given)
    species = flowers.numbers(TRAIN, "species")
    np.testing.assert_array_equal(
        found["species_id"][:, 0], [species[row["species"]] for row in HELD]
    )
    known = np.array([row["petal_width"] for row in TRAIN])
    scaled = (np.array([row["petal_width"] for row in HELD]) - known.mean()) / known.std()
    np.testing.assert_allclose(found["petal_width_scaled"][:, 0], scaled, atol=1e-5)


@pytest.mark.slow
def test_the_run_is_recorded_and_the_other_commands_take_it(trained, capsys):
    recorded = json.loads((trained / "run/config.json").read_text())
    assert recorded["optimizer"]["learning_rate"] == 0.05
    assert recorded["train"]["steps"] == 40
    assert main(["evaluate", f"--workdir={trained / 'run'}", f"--config={CONFIG}"]) == 0
    last = [line for line in lines(trained) if line["split"] == "eval"][-1]
    assert f"accuracy {last['accuracy']:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_raw_examples_are_transformed_as_they_are_read_and_a_base_model_goes_on(
    artifacts, trained, tmp_path
):
    """On two devices; with a learning rate of 0 the model stays what it was."""
    still = {
        "model.width": 8,
        "optimizer.learning_rate": 0.0,
        "cluster.virtual_devices": 2,
    }
    given = {
        **raw(artifacts),
        "base_model": str(trained / "Format-Serving"),
        "train_steps": 1,
        "custom_config": {"overrides": still},
    }
    iris_fields.run_fn(fn_args(artifacts, tmp_path, **given))
    np.testing.assert_allclose(served(tmp_path, HELD), served(trained, HELD), atol=1e-6)
    before, now = ([x for x in lines(o) if x["split"] == "eval"][-1] for o in (trained, tmp_path))
    assert now["loss"] == pytest.approx(before["loss"], rel=1e-5)


MEASURES = """
import dataclasses
import tftpu
from tftpu.launch.tfx import Examples

@dataclasses.dataclass
class Linear(tftpu.ModelConfig):
    def build(self):
        import keras
        given = {n: keras.Input((1,), name=n) for n in ("petal_length", "sepal_length")}
        dense = keras.layers.Dense(1, kernel_initializer="ones", name="dense")
        return keras.Model(given, dense(keras.layers.Concatenate()([*given.values()])))

def get_config():
    data = Examples(label="petal_width", features=("petal_length", "sepal_length"))
    return tftpu.Experiment(Linear(), data, optimizer="sgd", loss="mse")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("in_scratch_project")
def test_a_pipeline_without_transform_is_read_by_its_schema(artifacts, tmp_path):
    (tmp_path / "mine.py").write_text(MEASURES)
    overrides = {"data.global_batch_size": 50, "optimizer": "adam"}
    given = {
        **raw(artifacts),
        "transform_graph_path": None,
        "train_steps": 2,
        "eval_steps": 1,
        "custom_config": {"config": "mine.py", "overrides": overrides, "ai_platform_x": 1},
    }
    run_fn(fn_args(artifacts, tmp_path, **given))
    folder = str(tmp_path / "Format-Serving")
    assert [*tf.saved_model.load(folder).signatures] == ["serving_default"]
    dense = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    kernel, bias = weights_of(tmp_path, dense).values()
    x = np.array([[row["petal_length"], row["sepal_length"]] for row in HELD])
    np.testing.assert_allclose(served(tmp_path, HELD, "petal_width"), x @ kernel + bias, rtol=1e-5)
    assert not np.allclose(kernel, 1.0, atol=1e-4)  # it was trained


def data(artifacts: Path, **changed: Any) -> Examples:
    found = Examples(
        label="species_id",
        global_batch_size=16,
        train_files=(str(artifacts / "transformed/Split-train/*"),),
        eval_files=(str(artifacts / "transformed/Split-eval/*"),),
        transform_graph=str(artifacts / "graph"),
    )
    return dataclasses.replace(found, **changed)


def labels(artifacts: Path, seed: int, passes: int = 1) -> list[int]:
    from tftpu.config import DataContext

    batches = reading.build_training(data(artifacts), DataContext(seed, 16)).repeat(passes)
    return np.concatenate([y for _, y in batches.as_numpy_iterator()]).tolist()


@pytest.mark.medium
def test_the_order_depends_on_the_seed_alone_and_changes_from_pass_to_pass(artifacts):
    first = labels(artifacts, 1, passes=2)
    assert first == labels(artifacts, 1, passes=2) != labels(artifacts, 2, passes=2)
    assert first[:100] != first[100:] and sorted(first[:100]) == sorted(first[100:])


@pytest.mark.medium
def test_the_first_batches_are_evaluated_where_the_pipeline_says_how_many(artifacts):
    from tftpu.config import DataContext

    few = reading.build_evaluation(data(artifacts, eval_steps=2), DataContext(0, 16))
    assert [len(y) for _, y in few.as_numpy_iterator()] == [16, 16]
    whole = reading.build_evaluation(data(artifacts), DataContext(0, 16))
    assert sum(len(y) for _, y in whole.as_numpy_iterator()) == len(HELD)


@pytest.mark.medium
def test_a_file_that_several_patterns_match_is_read_once(artifacts):
    from tftpu.config import DataContext

    patterns = tuple(str(artifacts / f"transformed/Split-eval/{end}") for end in ("*", "*.gz*"))
    once = reading.build_evaluation(data(artifacts, eval_files=patterns), DataContext(0, 16))
    assert sum(len(y) for _, y in once.as_numpy_iterator()) == len(HELD)


def test_shapes_are_known_without_reading(artifacts):
    x, y = data(artifacts, train_files=()).batch_spec(8)
    assert (x["field_id"].shape, x["field_id"].dtype) == ((8, 1), tf.int64)
    assert x["petal_width_scaled"].shape == (8, 1)
    assert (y.shape, y.dtype) == ((8,), tf.int64)  # class ids, one for each example


def test_only_the_features_that_the_model_needs_are_asked_for(artifacts):
    chosen = features.Features(data(artifacts, features=("field_id", "petal_width_scaled")))
    assert sorted(chosen.select_served()) == ["field", "petal_width"]


BAD_DATA = {
    "label": ({"label": "specie_id"}, "data.label names 'specie_id'.*Did you mean 'species_id'"),
    "feature": ({"features": ("petal",)}, "data.features names 'petal', but the transform graph"),
    "no description": ({"transform_graph": ""}, "neither a transform graph nor a schema"),
    "no graph": ({"transform_graph": "nowhere"}, "The transform graph 'nowhere' cannot be read"),
    "no files": ({"train_files": ("nowhere/*",)}, "nowhere/.*, but no file has such a name"),
    "empty": ({"train_files": ()}, "empty: run_fn sets it from the pipeline"),
    "raw for transformed": ({"train_files": "raw"}, "has no .*field_id.*transformed=False for"),
    "transformed for raw": ({"transformed": False}, "has no .*field.*species.*it has field_id"),
    "text": (
        {"transform_graph": "", "schema": "schema.pbtxt", "label": "petal_width"},
        "The feature 'field' is text.*compute_and_apply_vocabulary.*choose others",
    ),
    "text label": (
        {
            "transform_graph": "",
            "schema": "schema.pbtxt",
            "label": "species",
            "features": ("petal_width",),
        },
        "The label 'species' is text",
    ),
    "no shape": (
        {"transform_graph": "", "schema": "shapeless", "label": "x"},
        r"The label 'x' has no fixed shape.*infer_feature_shape=True",
    ),
    "no schema": (
        {"transform_graph": "", "schema": "graph/transform_fn/saved_model.pb", "label": "x"},
        "The schema .* cannot be read",
    ),
    "another type": (
        {"transform_graph": "", "schema": "integers", "train_files": "raw", "label": "petal_width"},
        "first example .* does not match the schema .*: ",
    ),
    "no examples": ({"train_files": "empty.gz"}, r"empty.gz \(data.train_files\) hold no examples"),
    "other files": (
        {"train_files": "schema.pbtxt"},
        "schema.pbtxt .* are not TFRecords of tf.Example",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_used_are_refused_in_a_line(name, artifacts):
    from tftpu.config import DataContext

    changed, said = BAD_DATA[name]
    changed = dict(changed)
    write(artifacts / "empty.gz", [])
    integers = (
        'feature { name: "%s" type: INT presence { min_fraction: 1 } shape { dim { size: 1 } } }'
    )
    named = [integers % name for name in ("petal_width", "sepal_width")]
    (artifacts / "integers").write_text("".join(named))
    (artifacts / "shapeless").write_text('feature { name: "x" type: FLOAT }')
    if changed.get("schema"):
        changed["schema"] = str(artifacts / changed["schema"])
    if isinstance(changed.get("train_files"), str):
        path = artifacts / changed["train_files"]
        changed["train_files"] = (str(path / "Split-train/*" if path.is_dir() else path),)
    with pytest.raises(UserError) as refused:
        reading.build_training(data(artifacts, **changed), DataContext(0, 16))
    assert re.search(said, str(refused.value), re.S), refused.value


BAD_ARGUMENTS = {
    "no config": ({"custom_config": None}, "run_fn got no config"),
    "typing error": ({"custom_config": {"override": {}}}, "custom_config has 'override'.*mean"),
    "list": ({"overrides": ["model.width=1"]}, r"a dictionary of fields by their paths"),
    "field": ({"overrides": {"model.widht": 1}}, r"overrides'\]: --config.model.widht: .*width"),
    "tuned": (
        {"hyperparameters": {"values": {"learning_rate": 1}}},
        "The hyperparameters: --config.learning_rate: config has no field",
    ),
    "flat": ({"hyperparameters": {"model.width": 1}}, "without the dictionary 'values'"),
    "an input": ({"overrides": {"data.eval_steps": 3}}, "sets data.eval_steps, but the pipeline"),
    "two lengths": ({"overrides": {"train.epochs": 1}}, "train_args sets num_steps=40: leave one"),
    "other data": ({"custom_config": {"config": "digits_resnet"}}, "has data=Images"),
    "view": (
        {"data_accessor": SimpleNamespace(data_view_decode_fn=len)},
        "need a DataView to decode them",
    ),
    "no graph": (
        {"overrides": {"data.transformed": False}, "transform_graph_path": None},
        "needs a transform graph, but the pipeline has none",
    ),
    "base": ({"base_model": "nowhere"}, "base model 'nowhere' has no assets.extra/tftpu"),
    "engine": (
        {"overrides": {"cluster.engine": "jax"}},
        "JAX engine .the config asks for it.*trains on the TensorFlow engine",
    ),
}


@pytest.mark.usefixtures("in_scratch_project")
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_cannot_be_honoured_are_refused_before_training(name, artifacts, tmp_path):
    changed, said = BAD_ARGUMENTS[name]
    changed = dict(changed)
    if "overrides" in changed:
        changed["custom_config"] = {"config": CONFIG, "overrides": changed.pop("overrides")}
    with pytest.raises(UserError, match=said):
        run_fn(fn_args(artifacts, tmp_path, **changed))
    assert not (tmp_path / "Format-Serving").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("in_scratch_project")
def test_a_base_model_of_another_shape_is_refused(artifacts, trained, tmp_path):
    given = {"base_model": str(trained / "Format-Serving"), "train_steps": 1}
    with pytest.raises(UserError, match="differs from the config's model"):
        run_fn(fn_args(artifacts, tmp_path, **given))


def test_a_second_config_beside_the_module_files_own_is_refused(artifacts, tmp_path):
    with pytest.raises(UserError, match="both a config in custom_config and a get_config"):
        run_fn(fn_args(artifacts, tmp_path), iris_fields.get_config)
