"""Images read while training: from shards, from TFDS, from files; and their errors."""

import dataclasses
import io
import json
import logging
import re
import shutil
import tarfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.support.data import data_sets
from tftpu import input_pipelines
from tftpu.engines.data.conversion import Pipeline, build_training
from tftpu.errors import UserError
from tftpu.input_pipelines import pipeline as pipeline_module
from tftpu.input_pipelines.convert import converter
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.datasets import streamed_images
from tftpu.input_pipelines.reading import damage
from tftpu.input_pipelines.sources import Augment, StreamedImages
from tftpu.launch import failures
from tftpu.launch.data_checks import splits

PLAIN = Augment(crop=False, flip=False)


def settings(folder, **changes) -> StreamedImages:
    """Returns unaugmented images with pixels from 0 to 255."""
    given = {"format": "tfrecord", "data_dir": str(folder), "image_size": 8, "num_classes": 10}
    given |= {
        "global_batch_size": 8,
        "augment": PLAIN,
        "image_dtype": "uint8",
        "eval_split": "train",
    }
    data = StreamedImages(**{**given, "shuffle": 16, **changes})
    data.validate()
    return data


def seen(dataset: tf.data.Dataset, steps: int) -> list:
    """Returns the grey level of each image, batch by batch, after checking the labels."""
    levels = []
    for images, labels, *_ in dataset.take(steps).as_numpy_iterator():
        levels.append(np.rint(images.mean(axis=(1, 2, 3))).astype(int).tolist())
        if labels.ndim == 1:
            assert [level % 10 for level in levels[-1]] == labels.tolist()
    return levels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    examples = data_sets.split(data_sets.pictures(40), 11, 13, 9, 7)
    data_sets.shards(folder, data_sets.IMAGES, {"train": examples})
    return folder


@pytest.mark.slow
def test_a_run_resumes_through_the_complete_pipeline_on_other_hosts(folder):
    pipeline = input_pipelines.training(settings(folder), seed=3)
    whole = seen(pipeline.starting_at(0), 10)
    for stop, hosts in ((3, 2), (6, 1)):
        parts = [seen(pipeline.starting_at(stop, h, hosts), 3) for h in range(hosts)]
        assert [list(chain(*step)) for step in zip(*parts)] == whole[stop : stop + 3]
    assert sorted([*chain(*whole)][:40]) == list(range(40))


@pytest.mark.slow
def test_augmentation_is_the_same_on_any_number_of_hosts(folder):
    augment = Augment(erasing=0.5, mixup=0.2, cutmix=1.0)
    data = settings(folder, augment=augment, space_to_depth=True, image_dtype="float32")
    pipeline = input_pipelines.training(data, seed=3)
    whole = list(pipeline.starting_at(2).take(2).as_numpy_iterator())
    halves = [pipeline.starting_at(2, h, 2).take(2).as_numpy_iterator() for h in (0, 1)]
    for (images, labels), *parts in zip(whole, *halves):
        np.testing.assert_array_equal(images, np.concatenate([part[0] for part in parts]))
        np.testing.assert_array_equal(labels, np.concatenate([part[1] for part in parts]))
    with pytest.raises(UserError, match="CutMix mix pairs: make the global batch a multiple"):
        pipeline.starting_at(0, 0, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"image_dtype": "bfloat16"}, {"augment": Augment(mixup=1.0)}]
)
def test_batches_match_the_spec(folder, changes):
    data = settings(folder, space_to_depth=True, **changes)
    expected = input_pipelines.batch_spec(data, 8)
    batches = input_pipelines.training(data, 0).starting_at(0)
    assert batches.element_spec == expected
    for batch in batches.take(1):
        assert tf.nest.map_structure(tf.TensorSpec.from_tensor, batch) == expected
    for spec, found in zip(expected, input_pipelines.evaluation(data).element_spec):
        assert (found.dtype, found.shape[1:]) == (spec.dtype, spec.shape[1:])


@pytest.mark.slow
def test_evaluation_sees_every_image_once(folder):
    levels = chain(*seen(input_pipelines.evaluation(settings(folder)), 100))
    assert sorted(levels) == list(range(40))


@pytest.mark.slow
def test_the_engine_feeds_it(folder):
    pipeline = input_pipelines.training(settings(folder, image_dtype="float32"))
    assert isinstance(pipeline, Pipeline)
    images, labels = next(iter(build_training(pipeline, 5)))
    assert images.shape == (8, 8, 8, 3) and labels.shape == (8,)


def bad_folder(path: Path, **bad) -> Path:
    """Writes 40 images, with some of them replaced."""
    examples = data_sets.pictures(40)
    for number, example in bad.items():
        examples[int(number[1:])] = example
    parts = data_sets.split(examples, 11, 13, 9, 7)
    data_sets.shards(path, data_sets.IMAGES, {"train": parts})
    return path


BAD = {
    "a truncated JPEG": (
        {"image": data_sets.picture(14)[:300], "label": 4},
        "cannot be prepared: .*Invalid JPEG",
    ),
    "no image": ({"image": b"hello", "label": 4}, "is not an image that can be read"),
    "a class out of range": (
        data_sets.example_proto.encode(
            {"image": data_sets.picture(14), "label": 10},
            {**data_sets.IMAGES, "label": data_sets.Feature("int32", num_classes=11)},
        ),
        r"cannot be prepared: .*the class id 'label' is not in \[0, 10\)",
    ),
    "nothing at all": (b"", "is empty: the program that wrote the file stored no data in it"),
    "a wrong feature": (
        data_sets.example_proto.encode({"picture": 1}, {"picture": data_sets.Feature("int32")}),
        "cannot be prepared: .*Feature: (image|label)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD)
def test_a_record_that_cannot_be_used_is_named(tmp_path, kind):
    example, message = BAD[kind]
    data = settings(bad_folder(tmp_path, n14=example))
    expected = f"record 3 of {tmp_path}/train-00001 {message}"
    with pytest.raises(tf.errors.OpError) as error:
        seen(input_pipelines.training(data).starting_at(0), 5)
    assert re.search(expected, str(error.value), re.DOTALL)
    line = failures.explain(error.value).splitlines()[0]
    assert line.startswith("The data cannot be read: record 3 of ")
    assert "leave such records out" in line and "--config.data.on_bad_record=skip" in line


@pytest.mark.slow
def test_a_corrupt_record_is_named(tmp_path):
    bad_folder(tmp_path)
    path = tmp_path / "train-00002"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    data = settings(tmp_path)
    for open_batches in (
        lambda: input_pipelines.training(data).starting_at(0),
        lambda: input_pipelines.evaluation(data),
    ):
        with pytest.raises(tf.errors.OpError, match=f"record . of {path} cannot be read: .*check"):
            seen(open_batches(), 5)
    [finding] = splits.inspect_evaluation(data)
    assert finding.level == "error"
    assert re.match(f"evaluation: The data cannot be read: record . of {path} ", finding.text)


@pytest.mark.parametrize("small", [True, False])
def test_a_small_evaluation_split_is_read_once(folder, tmp_path, monkeypatch, small):
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    whole = list(input_pipelines.evaluation(settings(folder)).as_numpy_iterator())
    size = sum(part.nbytes for batch in whole for part in batch)
    monkeypatch.setattr(pipeline_module, "_SMALL", size if small else size - 1)
    batches = input_pipelines.evaluation(settings(copied))
    shutil.rmtree(copied)
    if not small:
        with pytest.raises(tf.errors.OpError):
            list(batches)
        return
    for _ in range(2):
        again = list(batches.as_numpy_iterator())
        tf.nest.map_structure(np.testing.assert_array_equal, again, whole)


@pytest.mark.slow
def test_skipped_records_have_weight_0_and_shift_no_others(tmp_path, folder, caplog):
    bad = {f"n{n}": BAD[kind][0] for n, kind in zip((2, 14, 15, 30), BAD)}
    data = settings(bad_folder(tmp_path, **bad), on_bad_record="skip")
    clean = input_pipelines.training(settings(folder), seed=3)
    clean = [*chain(*seen(clean.starting_at(0), 10))]
    pipeline = input_pipelines.training(data, seed=3)

    def weighed(start: int, steps: int, host: int = 0, hosts: int = 1):
        rows = []
        for images, _, weights in pipeline.starting_at(start, host, hosts).take(steps):
            levels = np.rint(images.numpy().mean(axis=(1, 2, 3))).astype(int)
            rows.append(np.stack([levels, weights.numpy()], axis=1))
        return rows

    with caplog.at_level(logging.WARNING):
        whole = weighed(0, 10)
    levels, weights = np.concatenate(whole).T
    good = weights == 1
    assert sorted(np.array(clean)[~good][:4]) == [2, 14, 15, 30]
    assert levels[good].tolist() == np.array(clean)[good].tolist()
    assert not levels[~good].any()
    parts = [weighed(4, 3, host, 2) for host in (0, 1)]
    for step, shares in zip(whole[4:7], zip(*parts)):
        assert step.tolist() == np.concatenate(shares).tolist()
    warnings = [r for r in caplog.records if r.name == "tftpu.input_pipelines.pipeline"]
    assert len(warnings) == 4 and "(4 so far)" in warnings[-1].getMessage()


@pytest.mark.slow
def test_a_skipped_image_is_decoded_and_named_once(tmp_path, capfd, caplog):
    as_files(tmp_path, "folder")
    damaged = next((tmp_path / "train").glob("*/*.jpg"))
    damaged.write_bytes(b"\xff\xd8\xffgarbage" + bytes(500))
    data = settings(tmp_path, format="folder", eval_split="train2", global_batch_size=5)
    data.on_bad_record = "skip"
    epochs = input_pipelines.training(data, seed=1).starting_at(0).take(4 * 40)
    weights = [weight for _, _, weights in epochs for weight in weights.numpy()]
    assert weights.count(0.0) == 40
    # Only by the chunks that were being prepared before it was known, and to find the reason.
    assert capfd.readouterr().err.count("Unsupported marker type 0x67") < 40
    assert sum("Skipped" in line for line in caplog.messages) == 1


@pytest.mark.slow
def test_too_many_skipped_records_stop_the_run(tmp_path):
    bad = {f"n{n}": {"image": b"hello", "label": 1} for n in range(5, 9)}
    data = settings(bad_folder(tmp_path, **bad), on_bad_record="skip", max_bad_records=3)
    with pytest.raises(tf.errors.OpError, match=r"4 bad records.*more than max_bad_records=3"):
        seen(input_pipelines.training(data).starting_at(0), 10)


def test_shards_that_are_missing_or_changed_are_named(tmp_path):
    bad_folder(tmp_path)
    path = tmp_path / "train-00001"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=f"{path} has .* bytes, but it had"):
        input_pipelines.training(settings(tmp_path))
    path.unlink()
    with pytest.raises(UserError, match=f"names the shard {path}, but that file is missing"):
        input_pipelines.training(settings(tmp_path))


@pytest.mark.slow
def test_a_shard_removed_while_it_is_read_ends_the_run(tmp_path):
    """The error names the file, instead of retrying forever."""
    bad_folder(tmp_path)
    batches = iter(input_pipelines.training(settings(tmp_path)).starting_at(0))
    next(batches)
    path = tmp_path / "train-00001"
    path.unlink()
    # If it is removed right after it was opened, its records cannot be read.
    errors = tf.errors.NotFoundError, tf.errors.UnknownError
    with pytest.raises(errors, match=f"{path}|{path.name}.*cannot be read"):
        for _ in range(100):
            next(batches)


@pytest.mark.timeout(60)
def test_a_file_that_cannot_be_opened_is_not_retried_forever(tmp_path):
    """An example is a file that is removed between two reads."""
    gone = tf.data.TFRecordDataset(str(tmp_path / "gone"))
    found = [record.numpy() for record, _ in damage.ignore_failures(gone, tf.constant(5, tf.int64))]
    assert found == [b""] * 5


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": "tfrecords"}, "Did you mean 'tfrecord'"),
        ({"train_split": "trian"}, "Did you mean 'train'"),
        ({"num_classes": 5}, "set data.num_classes=10"),
        ({"data_dir": "/nowhere"}, "There is no data set in /nowhere"),
        ({"data_dir": None}, "data.data_dir is empty"),
        ({"on_bad_record": "ignore"}, "Allowed: raise, skip"),
        ({"service": "grpc://localhost:1"}, "as HOST:PORT"),
        ({"service": "a:1", "on_bad_record": "skip"}, "use only one of the two"),
        ({"image_dtype": "float16"}, "image_dtype"),
    ],
)
def test_a_mistake_fails_with_a_clear_error(folder, changes, message):
    with pytest.raises(UserError, match=message):
        input_pipelines.training(settings(folder, **changes))


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Prepares ImageNet with TFDS's builder from synthetic tars: 4 classes of 8, 12 to evaluate."""
    root = tmp_path_factory.mktemp("tfds")
    manual = root / "downloads" / "manual"
    manual.mkdir(parents=True)
    names = Path(tfds.__file__).parent / "datasets" / "imagenet2012" / "labels.txt"
    names = names.read_text().split()[:4]

    def add(tar, name, data):
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))

    with tarfile.open(manual / "ILSVRC2012_img_train.tar", "w") as tar:
        for number, name in enumerate(names):
            file = io.BytesIO()
            with tarfile.open(fileobj=file, mode="w") as inner:
                for i in range(8):
                    add(inner, f"{name}_{i}.JPEG", data_sets.picture(8 * number + i))
            add(tar, f"{name}.tar", file.getvalue())
    with tarfile.open(manual / "ILSVRC2012_img_val.tar", "w") as tar:
        for i in range(1, 13):
            add(tar, f"ILSVRC2012_val_{i:08d}.JPEG", data_sets.picture(100 + i))
    builder = tfds.builder("imagenet2012", data_dir=root)
    config = tfds.download.DownloadConfig(manual_dir=manual, num_shards=4)
    builder.download_and_prepare(download_config=config)
    return root


@pytest.mark.exhaustive
def test_imagenet_as_tfds_prepares_it(imagenet):
    data = settings(imagenet, format="tfds", name="imagenet2012", num_classes=1000)
    data.eval_split = "validation"
    pipeline = input_pipelines.training(data, seed=1)
    assert pipeline.count == 32
    levels, classes = [], []
    for images, labels in pipeline.starting_at(0).take(4):
        levels += np.rint(images.numpy().mean(axis=(1, 2, 3))).astype(int).tolist()
        classes += labels.numpy().tolist()
    assert sorted(levels) == list(range(32))
    assert [level // 8 for level in levels] == classes
    part = settings(imagenet, format="tfds", name="imagenet2012", num_classes=1000)
    part.train_split = "train[25%:75%]"
    assert input_pipelines.training(part).count == 16
    total = sum(len(labels) for _, labels in input_pipelines.evaluation(data))
    assert total == 12


def test_a_tfds_data_set_that_is_not_prepared_names_the_command(tmp_path):
    data = settings(tmp_path, format="tfds", name="imagenet2012", num_classes=1000)
    with pytest.raises(UserError, match=f"builder.'imagenet2012', data_dir='{tmp_path}'"):
        input_pipelines.training(data)


class TwoLabels(tfds.core.GeneratorBasedBuilder):
    """A data set whose images have two class labels each."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "picture": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
            "fine": tfds.features.ClassLabel(num_classes=10),
            "coarse": tfds.features.ClassLabel(num_classes=2),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        examples = data_sets.pictures(12)
        coarse = [{**e, "coarse": e["label"] // 5} for e in examples]
        rows = [
            (n, {"picture": io.BytesIO(e["image"]), "fine": e["label"], "coarse": e["coarse"]})
            for n, e in enumerate(coarse)
        ]
        return {"train": iter(rows)}

    def _generate_examples(self):
        raise NotImplementedError


@pytest.mark.slow
def test_a_tfds_data_set_by_the_advice_of_its_errors(tmp_path):
    data = settings(tmp_path, format="tfds", name="two_labels")
    with pytest.raises(UserError, match="is not prepared in") as error:
        input_pipelines.training(data)
    command = re.search('`python -c "(.*?)"`', str(error.value))
    assert command
    exec(command[1], {})
    with pytest.raises(UserError, match=r"set data\.image_feature and data\.label_feature"):
        input_pipelines.training(data)
    data.label_feature = "fine"
    assert sorted(chain(*seen(input_pipelines.evaluation(data), 9))) == list(range(12))


def as_files(folder: Path, kind: str) -> None:
    """Writes two splits of 20 images, as folders or with an index."""
    for name, first in (("train", 0), ("train2", 20)):
        rows = []
        for i in range(first, first + 20):
            inside = f"class{i % 10}" if kind == "folder" else "."
            path = folder / (name if kind == "folder" else "") / inside / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data_sets.picture(i))
            rows.append({"image": path.name, "label": i % 10})
        if kind == "csv":
            lines = ["image,label", *(f"{row['image']},{row['label']}" for row in rows)]
            (folder / f"{name}.csv").write_text("\n".join(lines))
        if kind == "jsonl":
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "csv", "jsonl"])
def test_files_of_images(tmp_path, kind):
    as_files(tmp_path, kind)
    layout = "folder" if kind == "folder" else "index"
    data = settings(tmp_path, format=layout, eval_split="train2", global_batch_size=5)
    pipeline = input_pipelines.training(data, seed=1)
    whole = seen(pipeline.starting_at(0), 8)
    assert sorted(chain(*whole[:4])) == sorted(chain(*whole[4:])) == list(range(20))
    assert seen(pipeline.starting_at(5), 3) == whole[5:]
    assert sorted(chain(*seen(input_pipelines.evaluation(data), 9))) == list(range(20, 40))


@pytest.mark.slow
def test_mistakes_in_files_of_images_are_named(tmp_path):
    as_files(tmp_path, "folder")
    bad = tmp_path / "train" / "class4" / "14.jpg"
    bad.write_bytes(data_sets.picture(14)[:200])
    data = settings(tmp_path, format="folder")
    with pytest.raises(tf.errors.OpError, match=f"{bad} cannot be prepared: Invalid JPEG"):
        seen(input_pipelines.training(data).starting_at(0), 5)
    (tmp_path / "train2" / "class9").rename(tmp_path / "train2" / "class99")
    data.eval_split = "train2"
    with pytest.raises(UserError, match="the folders class99, which are not among the classes"):
        input_pipelines.evaluation(data)
    with pytest.raises(
        UserError, match="has no index for the split 'train': give the split a single table"
    ):
        input_pipelines.training(settings(tmp_path, format="index"))


@pytest.mark.medium
def test_the_source_of_a_converted_image_can_be_kept(pictures, tmp_path):
    output = str(tmp_path / "shards")
    converter.run(Conversion(f"images:{pictures}", output), 1, say=lambda *_: None)
    data = StreamedImages(
        format="tfrecord", data_dir=output, eval_split="train", num_classes=3, image_size=8
    )
    found = input_pipelines.prediction(data, "evaluation")
    assert sorted(found.names) == ["label", "source"]
    kept = found.read_fields(range(60), ("label", "source"))
    folders = [name.split("/")[0] for name in kept["source"]]
    assert folders == [("cat", "dog", "owl")[label] for label in kept["label"]]
    assert len(set(kept["source"])) == 60


def test_of_a_folder_of_classes_one_image_in_five_is_held_out(pictures, tmp_path, capsys):
    data = settings(pictures, format="folder", eval_split="val", num_classes=3)
    training = input_pipelines.training(data)
    evaluation = input_pipelines.evaluation(data)
    said = "one in 5 images of each class, 12 in all, is held out to evaluate on"
    assert said in capsys.readouterr().out
    assert training.count == 48
    labels = [int(label) for _, batch in evaluation for label in batch]
    assert labels == [0] * 4 + [1] * 4 + [2] * 4
    parts = [streamed_images.list_split(data, split).images for split in ("train", "val")]
    paths = [{image.path for image in part} for part in parts]
    assert not paths[0] & paths[1] and len(paths[0] | paths[1]) == 60
    held = input_pipelines.prediction(data, "evaluation")
    assert held.read_fields(range(2, 12), ["label"])["label"].tolist() == labels[2:]
    slashed = dataclasses.replace(data, data_dir=f"{pictures}/")
    assert {image.path for image in streamed_images.list_split(slashed, "val").images} == paths[1]
    few = tmp_path / "few"
    for number in range(6):
        (few / "cdo"[number % 3]).mkdir(parents=True, exist_ok=True)
        (few / "cdo"[number % 3] / f"{number}.jpg").write_bytes(data_sets.picture(number))
    with pytest.raises(UserError, match="too few images to hold out one in 5 of each"):
        input_pipelines.evaluation(dataclasses.replace(data, data_dir=str(few)))


def test_the_evaluation_split_is_predicted_without_the_training_split(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "val")
    data = settings(tmp_path, format="folder", eval_split="val", num_classes=3)
    assert input_pipelines.prediction(data, "evaluation").count == 60


@pytest.mark.parametrize(
    ("folders", "data_dir", "message"),
    [
        (
            ["train", "tset"],
            "photos",
            "It has train, tset: name the folder of a split, --config.data.eval_split=NAME.",
        ),
        (["val", "tarin"], "photos", "--config.data.train_split=NAME."),
        (
            ["training", "testing"],
            "photos",
            "It has testing, training: name the folder of a split, "
            "--config.data.train_split=NAME --config.data.eval_split=NAME.",
        ),
        (["train", "val"], "photos/train", "Did you mean --config.data.data_dir=photos?"),
    ],
)
def test_a_missing_split_is_not_held_out(folders, data_dir, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in folders:
        (tmp_path / "photos" / name / "cat").mkdir(parents=True)
        (tmp_path / "photos" / name / "cat" / "1.jpg").write_bytes(data_sets.picture(1))
    data = StreamedImages(format="folder", data_dir=data_dir, eval_split="val", num_classes=1)
    with pytest.raises(UserError, match=re.escape(message)):
        input_pipelines.training(data)
        input_pipelines.evaluation(data)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_class_that_is_listed_twice_fails(num_classes):
    """With two classes, text labels of records would have the class ids 0 and 2."""
    classes = ("cat", "cat", "dog")
    data = StreamedImages(
        format="tfrecord", data_dir="records", classes=classes, num_classes=num_classes
    )
    with pytest.raises(UserError, match="has 3 names, 2 of them different, but"):
        data.validate()
