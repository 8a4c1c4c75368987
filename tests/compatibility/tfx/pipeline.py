"""Runs the pipeline in an environment that has TFX and tftpu; compares the model and the metric.

python -m tests.compatibility.tfx.pipeline FOLDER
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_model_analysis as tfma
from tfx import v1 as tfx

import tftpu
from tests.compatibility.tfx import flowers
from tests.compatibility.tfx.user import iris_fields
from tftpu.launch.tfx.base import WEIGHTS

MODULE = iris_fields.__file__
STEPS, WIDTH = 200, 24


def components(folder: Path) -> list[Any]:
    """Returns the pipeline's components, from the CSV to two pushed models."""
    generated = tfx.components.CsvExampleGen(input_base=str(folder / "csv"))
    examples = generated.outputs["examples"]
    statistics = tfx.components.StatisticsGen(examples=examples)
    schema = tfx.components.SchemaGen(
        statistics=statistics.outputs["statistics"], infer_feature_shape=True
    )
    described = schema.outputs["schema"]
    transform = tfx.components.Transform(examples=examples, schema=described, module_file=MODULE)
    graph = transform.outputs["transform_graph"]
    trained = tfx.components.Trainer(
        run_fn="tftpu.launch.tfx.run_fn",
        examples=transform.outputs["transformed_examples"],
        transform_graph=graph,
        schema=described,
        train_args=tfx.proto.TrainArgs(num_steps=STEPS),
        eval_args=tfx.proto.EvalArgs(),
        custom_config={"config": MODULE, "overrides": {"model.width": WIDTH}},
    )
    again = tfx.components.Trainer(
        module_file=MODULE,
        examples=examples,
        transform_graph=graph,
        schema=described,
        base_model=trained.outputs["model"],
        train_args=tfx.proto.TrainArgs(num_steps=1),
        eval_args=tfx.proto.EvalArgs(),
        custom_config={"overrides": {"model.width": WIDTH, "optimizer.learning_rate": 0.0}},
    ).with_id("Again")
    parts = [generated, statistics, schema, transform, trained, again]
    for trainer, name in ((trained, "first"), (again, "again")):
        judged = tfx.components.Evaluator(
            examples=examples, model=trainer.outputs["model"], eval_config=eval_config()
        ).with_id(f"Evaluator_{name}")
        place = tfx.proto.PushDestination.Filesystem(base_directory=str(folder / "pushed" / name))
        pushed = tfx.components.Pusher(
            model=trainer.outputs["model"],
            model_blessing=judged.outputs["blessing"],
            push_destination=tfx.proto.PushDestination(filesystem=place),
        ).with_id(f"Pusher_{name}")
        parts += [judged, pushed]
    return parts


def eval_config() -> Any:
    """Returns what the Evaluator computes, of raw examples with their texts as labels."""
    bound = tfma.GenericValueThreshold(lower_bound={"value": 0.8})
    accuracy = tfma.MetricConfig(
        class_name="SparseCategoricalAccuracy",
        threshold=tfma.MetricThreshold(value_threshold=bound),
    )
    return tfma.EvalConfig(
        model_specs=[
            tfma.ModelSpec(
                signature_name="serving_default",
                label_key="species_id",
                preprocessing_function_names=["transform_features"],
            )
        ],
        slicing_specs=[tfma.SlicingSpec()],
        metrics_specs=[
            tfma.MetricsSpec(metrics=[accuracy, tfma.MetricConfig(class_name="ExampleCount")])
        ],
    )


def split(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns the raw examples of a split, as ExampleGen wrote them."""
    paths = map(str, folder.glob(f"root/CsvExampleGen/examples/*/Split-{name}/*"))
    found = []
    for record in tf.data.TFRecordDataset(sorted(paths), "GZIP").as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        row = {n: [*f.bytes_list.value, *f.float_list.value][0] for n, f in features.items()}
        found.append({n: v.decode() if isinstance(v, bytes) else v for n, v in row.items()})
    return found


def check(folder: Path, name: str, component: str, evaluator: str) -> dict[str, Any]:
    """Returns what the pushed model and the Evaluator differ by, from NumPy's values."""
    train, held = split(folder, "train"), split(folder, "eval")
    (pushed,) = (folder / "pushed" / name).iterdir()
    model = iris_fields.Classifier(width=WIDTH).build()
    model.load_weights(str(pushed / WEIGHTS))
    weights = {v.path: v.numpy() for v in model.weights}
    expected = flowers.logits_by_hand(held, train, weights)
    signature = tf.saved_model.load(str(pushed)).signatures["serving_default"]
    served = signature(examples=tf.constant([flowers.serialized(row, "species") for row in held]))[
        "logits"
    ].numpy()
    species = flowers.numbers(train, "species")
    accuracy = np.mean(expected.argmax(1) == [species[row["species"]] for row in held])
    (uri,) = folder.glob(f"root/{evaluator}/evaluation/*")
    ((_, metrics),) = tfma.load_eval_result(str(uri)).slicing_metrics
    found = metrics[""][""]
    (run,) = folder.glob(f"root/{component}/model_run/*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "examples": [len(held), int(found["example_count"]["doubleValue"])],
        "difference of the logits": float(np.abs(served - expected).max()),
        "accuracy by NumPy": float(accuracy),
        "accuracy of the Evaluator": found["sparse_categorical_accuracy"]["doubleValue"],
        "best accuracy of the run": max(x["accuracy"] for x in lines if x["split"] == "eval"),
    }


def main(folder: Path) -> None:
    """Runs the pipeline in an empty folder, and prints the comparisons."""
    (folder / "csv").mkdir(parents=True)
    rows = flowers.rows()
    with (folder / "csv" / "iris.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    pipeline = tfx.dsl.Pipeline(
        pipeline_name="iris",
        pipeline_root=str(folder / "root"),
        components=components(folder),
        metadata_connection_config=tfx.orchestration.metadata.sqlite_metadata_connection_config(
            str(folder / "metadata.db")
        ),
    )
    tfx.orchestration.LocalDagRunner().run(pipeline)
    print(f"TFX {tfx.__version__}, TensorFlow {tf.__version__}, tftpu {tftpu.__version__}")
    for name, component in (("first", "Trainer"), ("again", "Again")):
        found = check(folder, name, component, f"Evaluator_{name}")
        print(name, json.dumps(found))
        held, counted = found["examples"]
        accuracies = [value for key, value in found.items() if "accuracy" in key]
        same = held == counted and max(accuracies) - min(accuracies) < 1e-6
        if not (same and found["difference of the logits"] < 1e-4):
            sys.exit(f"{name}: the pipeline's values differ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
