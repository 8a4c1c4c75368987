"""`tftpu data check`: its findings for suitable and for unsuitable data."""

import dataclasses
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.data import data_sets
from tftpu import input_pipelines
from tftpu.config import DataConfig, DataContext, Experiment, ModelConfig
from tftpu.errors import UserError
from tftpu.input_pipelines import overlap
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.sources import Records, StreamedImages, Texts
from tftpu.launch import main
from tftpu.launch.commands.data import check as data_check
from tftpu.launch.data_checks import images
from tftpu.launch.preflight import reports
from tftpu.models.sizes import GPT, ResNet
from tftpu.runtime import slow
from tftpu.storage import buckets

IMAGE = np.zeros((2, 3), np.float32)  # of two examples
CONFIG = """
from tftpu.config import Experiment
from tftpu.input_pipelines.sources import Records, StreamedImages
from tftpu.models.sizes import ResNet

def get_config():
    data = Records(data_dir={folder!r}, global_batch_size=8)
    return Experiment(model=ResNet(norm_batch=8), data=data)
"""


def data(folder, shards=4, compression="") -> Records:
    features = {"x": Feature("float32", (3,)), "y": Feature("int32", num_classes=2)}
    examples = [{"x": np.ones(3), "y": i % 2} for i in range(40)]
    parts = data_sets.split(examples, *[40 // shards] * shards)
    data_sets.shards(folder, features, {"train": parts, "test": parts[:1]}, compression)
    return Records(data_dir=str(folder), global_batch_size=8)


def levels(findings) -> list[str]:
    return [finding.level for finding in findings]


@pytest.mark.slow
def test_the_command_prints_its_findings(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(data_check, "SECONDS", 0.1)
    data(tmp_path)
    config = tmp_path / "own.py"
    config.write_text(CONFIG.format(folder=str(tmp_path)))
    report = {"slices": [{"slice": "v5e-8", "examples_per_second": 1e9}, {"slice": "v2-8"}]}
    (tmp_path / "preflight.json").write_text(json.dumps(report))
    command = ["data", "check", f"--config={config}", f"--workdir={tmp_path}"]
    assert main.main([*command, "--hosts=2", "--need=1e9"]) == 0
    out, err = capfd.readouterr()
    assert err.startswith(f"Loading {config} and TensorFlow ...\nOpening the data ...\n")
    assert "Reading a batch, then timing the pipeline for 0.1 s ..." in err
    assert "ok       a host's batch is float32[4, 3], int32[4]" in out
    assert "40 examples in 4 shards" in out and "in 4 streams" in out
    assert "warning  this host gives" in out and "the TPU needs 1,000,000,000" in out
    assert main.main(command) == 0
    assert "preflight.json is of an older tftpu, or of another model" in capfd.readouterr().out
    monkeypatch.setattr(slow, "_FIRST", 0.0001)
    assert main.main([*command, "--need=1"]) == 0
    out, err = capfd.readouterr()
    assert "the TPU needs 1: 1 host is enough" in out
    for doing in (f"Loading {config} and TensorFlow", "Opening the data"):
        assert f"{doing}: 0 s so far" in err
    assert "ok       the evaluation split can be read" in out
    without = "--config.data.eval_split=val"
    assert main.main([*command, without]) == 2
    assert "error    evaluation: The data set in" in capfd.readouterr().out
    assert main.main([*command, "--gate=acuracy>=0.9"]) == 2
    assert "Did you mean 'accuracy'?" in capfd.readouterr().err
    assert main.main([*command, "--hosts=3"]) == 2
    assert "cannot be divided among 3 hosts" in capfd.readouterr().err


def test_shapes_and_dtypes_that_no_tpu_supports_are_errors():
    fine = tf.TensorSpec((8, 3), tf.float32)
    assert levels(data_check.inspect_shapes((fine, fine), (fine, fine))) == ["ok"]
    assert levels(data_check.inspect_shapes((fine, fine, fine), (fine, fine))) == ["ok"]  # weights
    for part in (
        tf.TensorSpec((None, 3), tf.float32),
        tf.TensorSpec((8,), tf.string),
        tf.TensorSpec((8,), tf.int64),
    ):
        assert levels(data_check.inspect_shapes((part, fine), (part, fine))) == ["error"]
    assert levels(data_check.inspect_shapes((fine, fine), (fine,) * 3)) == ["error"]


def test_shards_that_hosts_cannot_share_evenly_are_a_warning(tmp_path):
    pipeline = input_pipelines.training(data(tmp_path, shards=2))
    assert levels(data_check.inspect_shards(pipeline, 2)) == ["ok"]
    (_, warning) = data_check.inspect_shards(pipeline, 4)
    assert "2 shards make 2 streams, which 4 hosts cannot share evenly" in warning.text


def test_compressed_shards_are_a_warning(tmp_path):
    pipeline = input_pipelines.training(data(tmp_path, compression="GZIP"))
    (_, warning) = data_check.inspect_shards(pipeline, 1)
    assert warning.level == "warning" and "reads all of it" in warning.text


@pytest.mark.medium
def test_memory_is_compared_with_the_hosts(tmp_path):
    pipeline = input_pipelines.training(data(tmp_path))
    # 4 streams read ahead 1 MiB each.
    for limit, level in ((1 << 30, "ok"), (6 << 20, "warning"), (1 << 20, "error")):
        (finding,) = data_check.inspect_memory(pipeline, 1, limit)
        assert finding.level == level
    arrays = input_pipelines.from_arrays(np.zeros((1 << 20, 1)), global_batch_size=8)
    (finding,) = data_check.inspect_memory(arrays, 1, 3 << 20)
    assert finding.level == "error" and "the whole data set" in finding.text


@pytest.mark.parametrize(
    "where, zone, level",
    [
        ("US-WEST4", "us-west4-a", "ok"),
        ("US", "us-west4-a", "ok"),
        ("EU", "europe-west4-a", "ok"),
        ("US", "europe-west4-a", "warning"),
        ("EUROPE-WEST4", "us-west4-a", "warning"),
        ("US-EAST1", "us-west4-a", "warning"),
    ],
)
def test_the_buckets_region_is_compared_with_the_tpus(monkeypatch, where, zone, level):
    monkeypatch.setattr(buckets, "find_location", {"mine": where}.__getitem__)
    assert levels(data_check.inspect_region("gs://mine/data", zone)) == [level]


def test_no_device_of_this_machine_is_taken(monkeypatch, capsys):
    def leave():
        raise UserError("devices are left alone")

    monkeypatch.setattr(data_check, "leave_devices_alone", leave)
    assert main.main(["data", "check", "digits_resnet"]) == 2
    assert "devices are left alone" in capsys.readouterr().err


def test_a_slow_host_gives_the_number_of_hosts_needed():
    need = {"a v5e-8": 7400}
    (finding,) = data_check.inspect_speed(1900, need, 1, 38000, " (by runs/a/preflight.json)")
    assert finding == data_check.Finding(
        "warning",
        "an epoch of 38,000 examples takes this host 20 s (1,900 examples/s); a v5e-8 needs 7,400 "
        "(by runs/a/preflight.json): 4 hosts like this one, or other machines that prepare the "
        "data (data.service)",
    )
    (finding,) = data_check.inspect_speed(1900, need, hosts=1, examples=3800)
    assert finding.level == "ok" and "epochs this short" in finding.text
    (finding,) = data_check.inspect_speed(1900, {}, 1, 1900, "to see")
    assert (
        finding.text == "an epoch of 1,900 examples takes this host 1 s (1,900 examples/s); to see"
    )
    (finding,) = data_check.inspect_speed(1900, {"a v5e-8": 7400}, hosts=4, examples=None)
    assert finding.level == "ok"


@pytest.mark.parametrize(
    ("model", "batch", "level", "text"),
    [
        (
            ResNet(num_classes=4),
            (IMAGE, [0, 3]),
            "ok",
            "labels of the first batches go from 0 to 3",
        ),
        (ResNet(num_classes=4), (IMAGE, [1, 4]), "error", "from 1 to 4, and model.num_classes=4"),
        (ResNet(num_classes=4), (IMAGE, [-1, 9]), "error", "4 takes 0 to 3: change the data.$"),
        (GPT(vocabulary=9), ([1, 9], [2, 3]), "error", "tokens .* 9, and model.vocabulary=9 takes"),
        (GPT(vocabulary=9), ({"tokens": [1, 2]}, [2, 9]), "error", "labels .* set it to 10"),
    ],
)
def test_ids_are_compared_with_the_classes_and_the_vocabulary_of_the_model(
    model, batch, level, text
):
    x, y = batch
    x = {name: np.array(ids) for name, ids in x.items()} if isinstance(x, dict) else np.array(x)
    findings = data_check.inspect_values(model, [(x, np.array(y))])
    (found,) = (finding for finding in findings if re.search(text, finding.text))
    assert found.level == level


@dataclasses.dataclass
class OwnClassifier(ModelConfig):
    """A model whose field has the name of one in the zoo, and means something else."""

    vocabulary: int = 50

    def build(self):
        layers = [
            keras.layers.Embedding(self.vocabulary, 4, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ]
        return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


@pytest.mark.parametrize(
    ("ids", "labels", "loss", "level", "texts"),
    [
        ([0, 49], [0, 1], None, "ok", ["labels, has values from 0 to 1 .* 2 classes", "0 to 49"]),
        ([0, 49], [0, 7], None, "error", ["labels, has the value 7 in .* 2 classes"]),
        ([0, 50], [0, 1], None, "error", ["x has the value 50 .* 'embedding[_0-9]*' has 50"]),
        ([0, 1], [0, 7], keras.losses.MeanSquaredError(), "ok", ["x has values from 0 to 1"]),
    ],
)
def test_the_numbers_for_a_users_model_are_compared_with_its_layers(
    ids, labels, loss, level, texts
):
    experiment = Experiment(model=OwnClassifier(), data=DataConfig(), loss=loss)
    batch = (np.repeat(np.int32(ids), 3).reshape(2, 3), np.int32(labels))
    found = data_check.inspect_own_values(experiment, [batch])
    assert levels(found) == [level] * len(texts)
    assert all(re.search(text, one.text) for text, one in zip(texts, found))


def test_a_users_model_that_cannot_be_built_is_an_error():
    experiment = Experiment(model=ModelConfig(), data=DataConfig())
    (found,) = data_check.inspect_own_values(experiment, [(IMAGE, np.int32([0, 1]))])
    assert found.level == "error" and "has no method build" in found.text


@pytest.mark.parametrize("ignored", [-1, 255])
def test_labels_of_the_class_that_the_loss_ignores_are_not_compared(ignored):
    batches = [(np.zeros((2, 3)), np.array([1, ignored]))]
    (finding,) = data_check.inspect_values(ResNet(num_classes=4), batches, ignored)
    assert finding.level == "ok"
    (finding,) = data_check.inspect_values(ResNet(num_classes=4), batches, 7)
    assert finding.level == "error"


def test_labels_without_a_weight_and_shares_of_classes_are_not_compared():
    x, y, weights = np.zeros((2, 3)), np.array([1, -100]), np.array([1.0, 0.0])
    (finding,) = data_check.inspect_values(ResNet(num_classes=4), [(x, y, weights)])
    assert finding.level == "ok"
    assert (
        data_check.inspect_values(ResNet(num_classes=4), [(x, np.ones((2, 4), np.float32))]) == []
    )


@pytest.mark.medium
def test_a_folder_of_pictures_is_counted_by_class_and_all_damaged_files_are_named(
    tmp_path, capsys, monkeypatch
):
    for split, classes in {"train": {"ant": 20, "bee": 2}, "val": {"ant": 1}}.items():
        for name, count in classes.items():
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                picture = tf.io.encode_png(np.full((8, 8, 3), number, np.uint8)).numpy()
                (tmp_path / split / name / f"{number}.PNG").write_bytes(picture)
    (tmp_path / "train/ant/notes.txt").write_text("no picture")
    photos = StreamedImages(
        format="folder", data_dir=str(tmp_path), eval_split="val", num_classes=2
    )
    texts = [finding.text for finding in data_check.inspect_images(photos)]
    assert texts[:4] == [
        "train: 22 images: ant 20, bee 2",
        "val: 1 image: ant 1, bee 0",
        "val has 1 image, so one that is right or wrong changes the accuracy by 1",
        "train has 20 images of ant, and 2 of bee: the accuracy says little about the rare class",
    ]
    assert texts[4:] == [
        "val has no images of bee",
        "1 of 1 evaluation example is also in the training split, so the model may just remember "
        "them: leave repeated examples out of one of the splits",
        "23 images can be decoded",
    ]
    monkeypatch.setattr(images, "_DECODED", 10)
    monkeypatch.setattr(images, "_PROGRESS", 0.0)
    capsys.readouterr()
    list(data_check.inspect_images(photos))
    assert "Decoding 23 images ...\n0 of 23 images ...\n10 of 23" in capsys.readouterr().err
    for number in range(11):
        (tmp_path / f"train/ant/{number}.PNG").write_bytes(b"")
    (tmp_path / "val/ant/0.PNG").write_bytes(b"\x89PNG\r\n")
    *_, found = data_check.inspect_images(photos)
    assert found.level == "error" and "12 of 23 images cannot be decoded: remove" in found.text
    assert "train/ant/0.PNG is empty" in found.text and found.text.endswith("and 2 others")
    photos.on_bad_record = "skip"
    assert levels(data_check.inspect_images(photos))[-1] == "warning"
    photos.eval_split = "test"
    assert levels(data_check.inspect_images(photos)) == ["error"]


@pytest.mark.parametrize("empty", ["train", "val"])
def test_a_split_without_images_is_named(tmp_path, empty):
    (tmp_path / "a.png").write_bytes(tf.io.encode_png(np.zeros((8, 8, 3), np.uint8)).numpy())
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").write_text("image,label\n" + "a.png,0\n" * (split != empty))
    photos = StreamedImages(format="index", data_dir=str(tmp_path), eval_split="val", num_classes=2)
    found = [finding.text for finding in data_check.inspect_images(photos)]
    assert f"{empty} has no images" in found and found[-1] == "1 image can be decoded"


@dataclasses.dataclass
class Numbers(DataConfig):
    """Rows of numbers, of which the first `shared` are in both splits."""

    shared: int = 0

    def rows(self, first: int, count: int) -> tf.data.Dataset:
        """Returns rows of two numbers, labelled by the split."""
        x = np.arange(first, first + count, dtype=np.float32)
        examples = {"a": x, "b": -x}, np.full(count, first, np.int32)
        return tf.data.Dataset.from_tensor_slices(examples).batch(4)

    def training(self, context: DataContext) -> tf.data.Dataset:
        """Returns 0 to 39, again and again."""
        return self.rows(0, 40).repeat()

    def evaluation(self, context: DataContext) -> tf.data.Dataset:
        """Returns 10 rows."""
        return self.rows(40 - self.shared, 10)


def test_evaluation_examples_that_are_trained_on_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overlap, "_MOST", 100)
    assert data_check.inspect_overlap(Numbers("numbers", 4), None, 0) == []
    (found,) = data_check.inspect_overlap(Numbers("numbers", 4, shared=3), None, 0)
    assert found.level == "warning"
    # The training data have no end.
    assert found.text.startswith("At least 3 of 10 evaluation examples are also in the training")
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(f"line {n % 45}" for n in range(60)))
    texts = Texts(train_text=str(lines), global_batch_size=8)
    (found,) = data_check.inspect_overlap(texts, None, 0)
    assert found.text.startswith("1 of 3 evaluation examples is also in")
    assert capsys.readouterr().out == ""


def test_the_splits_and_the_classes_of_shards_are_listed(tmp_path):
    parts = [[{"image": b"", "label": 0}] * 3]
    data_sets.shards(tmp_path, data_sets.IMAGES, {"train": parts, "validation": [parts[0][:1]]})
    path = tmp_path / "dataset.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"about": {"classes": ["cups", "plates"]}}))
    images = StreamedImages(format="tfrecord", data_dir=str(tmp_path))
    assert [finding.text for finding in data_check.inspect_images(images)] == [
        "train: 3 examples; validation: 1 example",
        "2 classes: cups, plates",
        "validation has 1 image, so one that is right or wrong changes the accuracy by 1",
    ]
    data_sets.shards(
        tmp_path / "b", data_sets.IMAGES, {s: [parts[0] * 40] for s in ("train", "validation")}
    )
    images.data_dir = str(tmp_path / "b")
    assert levels(data_check.inspect_images(images)) == ["ok"]


def test_the_price_of_another_batch_is_left_out(tmp_path, monkeypatch):
    def refuse(text: str):
        raise UserError(text)

    def read(*overrides: str):
        words = {"config": "digits_resnet", "workdir": str(tmp_path), "overrides": overrides}
        options = data_check.Options(**words)
        return data_check.read_needs(options.load_experiment(), options)

    command = f"`tftpu preflight digits_resnet --config.train.steps=9 --workdir={tmp_path}`"
    assert read("--config.train.steps=9") == (
        {},
        f"to compare it with a TPU: {command}, or give the examples per second that it needs, as "
        "in --need=1000",
    )
    experiment = data_check.Options(config="digits_resnet").load_experiment()
    batch = input_pipelines.batch_spec(experiment.data, experiment.data.global_batch_size)
    known = {"slice": "v5e-8", "step_ms": 1.5, "replicas": 8, "examples_per_second": 100.0}
    settings = reports.compute_settings(experiment, batch)
    (tmp_path / reports.FILE).write_text(json.dumps({"slices": [known], "settings": settings}))
    assert read() == ({"v5e-8": 100.0}, f" (by {tmp_path}/preflight.json)")
    needs, said = read("--config.data.global_batch_size=64")
    assert not needs and said.startswith(f"{tmp_path}/preflight.json is of another model, batch")
    (tmp_path / reports.FILE).write_text(json.dumps({"slices": [], "settings": settings}))
    needs, said = read()
    assert not needs and said.startswith(f"{tmp_path}/preflight.json gives no rate; to compare")
    (tmp_path / reports.FILE).write_text(json.dumps({"slices": [known]}))
    assert read()[1].startswith(f"{tmp_path}/preflight.json is of an older tftpu, or of another")
    monkeypatch.setattr(reports, "to_plain", lambda _: refuse("JSON cannot hold this field"))
    assert reports.compute_settings(experiment, batch) == ""
    assert read()[0] == {}  # neither is known: they are not taken to be alike
