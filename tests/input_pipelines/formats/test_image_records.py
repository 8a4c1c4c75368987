"""TFRecord files of images that other programs wrote, in the layouts of ImageNet and of Kaggle."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.support.data import data_sets
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines.convert.readers import addresses
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.sources import Augment, Records, StreamedImages
from tftpu.launch import main as command_line

CLASSES = ("daisy", "dandelion", "rose", "sunflower", "tulip")
COUNT = 12


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))


def record(**features) -> bytes:
    """Returns a record as TensorFlow makes it; names with __ for /."""
    kinds = {int: ("int64_list", tf.train.Int64List), float: ("float_list", tf.train.FloatList)}
    made = {}
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        kind_of = type(values[0]) if values else float
        field, kind = kinds.get(kind_of, ("bytes_list", tf.train.BytesList))
        made[name.replace("__", "/")] = tf.train.Feature(**{field: kind(value=values)})
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


def imagenet(number: int) -> bytes:
    """Returns a record with the features of TensorFlow's scripts, with class ids from 1."""
    return record(
        image__encoded=data_sets.picture(number),
        image__class__label=number % 5 + 1,
        image__class__text=CLASSES[number % 5].encode(),
        image__height=12,
        image__format=b"JPEG",
        image__object__bbox__xmin=[0.5] * (number % 3),
    )


def flowers(number: int) -> bytes:
    """Returns a record of Kaggle's flowers."""
    one_hot = [float(n == number % 5) for n in range(5)]
    name = CLASSES[number % 5].encode()
    data = {"image": data_sets.picture(number), "class": number % 5, "label": name}
    return record(**data, size=[12, 16], one_hot_class=one_hot)


def write(folder, make, names=("train-00000-of-00002", "train-00001-of-00002"), compression=""):
    """Writes the records by TensorFlow's own writer."""
    for n, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with tf.io.TFRecordWriter(str(folder / name), compression) as writer:
            for number in range(n, COUNT, len(names)):
                writer.write(make(number))
    return folder


def settings(folder, **changes) -> StreamedImages:
    given = {"format": "tfrecord", "data_dir": str(folder), "num_classes": 5, "image_size": 8}
    given |= {"augment": Augment(crop=False, flip=False), "image_dtype": "uint8"}
    data = StreamedImages(**{**given, "global_batch_size": 4, "eval_split": "train", **changes})
    data.validate()
    return data


def labels_of(data: StreamedImages) -> dict[int, int]:
    """Returns the label of each picture, by its grey level."""
    batches = input_pipelines.evaluation(data)
    assert batches is not None
    return {
        int(np.rint(image.mean())): int(label)
        for images, labels in batches.as_numpy_iterator()
        for image, label in zip(images, labels)
    }


RIGHT = {number: number % 5 for number in range(COUNT)}
IMAGENET = {"image_feature": "image/encoded", "label_feature": "image/class/label"}


TEXTS = {**IMAGENET, "label_feature": "image/class/text", "classes": CLASSES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "names", "compression", "features"),
    [
        (imagenet, ("train-0", "train-1"), "", {**IMAGENET, "first_class": 1}),
        (imagenet, ("train-0",), "GZIP", TEXTS),
        (flowers, ("train/0-16x12-6.tfrec", "train/1.tfrec"), "GZIP", {"label_feature": "class"}),
        (flowers, ("train/0-16x12-12.tfrec",), "", {"classes": CLASSES}),
    ],
)
def test_records_of_other_writers(tmp_path, make, names, compression, features):
    write(tmp_path / "in", make, names, compression)
    (tmp_path / "in" / ".DS_Store").write_bytes(b"x")
    data = settings(tmp_path / "in", **features)
    assert labels_of(data) == RIGHT
    pipeline = input_pipelines.training(data)
    assert pipeline.count == COUNT
    assert input_pipelines.class_names(data) == (list(data.classes) or None)


@pytest.mark.slow
def test_a_class_that_is_not_known_names_the_record(tmp_path):
    write(tmp_path / "in", imagenet, ("train-0",))
    with pytest.raises(tf.errors.OpError, match=r"record 4 of .*'image/class/label' is not in \[0"):
        labels_of(settings(tmp_path / "in", **IMAGENET))
    names = {**TEXTS, "classes": (*CLASSES[:4], "x")}
    with pytest.raises(tf.errors.OpError, match=r"record 4 of .*tulip.*none of the 5 classes"):
        labels_of(settings(tmp_path / "in", **names))


@pytest.mark.slow
def test_what_each_error_advises_works(tmp_path):
    """From records that nobody described to training on them, by the errors' words alone."""
    folder = write(tmp_path / "in", flowers)
    records = Records(data_dir=str(folder), features=("image",), label="class")
    with pytest.raises(UserError, match="For records of images, use StreamedImages") as error:
        input_pipelines.training(records)
    lines = re.search(r"as in \((.*)\)\.", str(error.value))
    assert lines
    spec = tuple(line.strip("'") for line in lines[1].split("', '"))
    assert "image: image" in spec and "one_hot_class: float32[5]" in spec
    with pytest.raises(UserError, match=r"use StreamedImages with format=tfrecord"):
        input_pipelines.training(Records(**{**vars(records), "spec": spec}))
    with pytest.raises(
        UserError, match=r"'label' is a text\. List the texts in `classes`"
    ) as error:
        input_pipelines.training(settings(folder))
    assert "or set label_feature to the class id" in str(error.value)
    assert "'class: int64'" in str(error.value)
    assert labels_of(settings(folder, label_feature="class")) == RIGHT
    with pytest.raises(UserError, match="set image_feature and label_feature") as error:
        input_pipelines.training(settings(folder, image_feature="picture"))
    with pytest.raises(UserError, match="must hold one class id or one text for each image"):
        input_pipelines.training(settings(folder, label_feature="one_hot_class"))
    one_hot = Records(data_dir=str(folder), features=("one_hot_class",), label="class", spec=spec)
    assert input_pipelines.training(one_hot).count == COUNT


@pytest.mark.medium
def test_names_with_slashes_are_described(tmp_path):
    folder = write(tmp_path / "in", imagenet, compression="GZIP")
    spec = ("image/class/label: int64 num_classes=6", "image/height: int64")
    data = Records(
        data_dir=str(folder),
        spec=spec,
        features=("image/height",),
        label="image/class/label",
        eval_split="train",
        global_batch_size=4,
    )
    data.validate()
    assert manifest.describe_features(manifest.parse_features(spec)) == f"'{spec[0]}', '{spec[1]}'"
    found = input_pipelines.evaluation(data)
    assert found is not None
    labels = np.concatenate([labels for _, labels in found.as_numpy_iterator()])
    assert sorted(labels) == sorted(n % 5 + 1 for n in range(COUNT))


@pytest.mark.slow
def test_the_command_line_converts_them(tmp_path, capsys):
    folder = write(tmp_path / "in", imagenet)
    words = [f"--source=tfrecord:{folder}", f"--output={tmp_path}/out", "--workers=1"]
    wrong = ["data", "convert", *words]
    assert command_line.main(wrong) == 2
    assert "set image_feature and label_feature" in capsys.readouterr().err
    wrong += ["--image_feature=image/encoded", "--label_feature=image/class/label"]
    assert command_line.main(wrong) == 2
    assert "set num_classes" in capsys.readouterr().err
    wrong += ["--num_classes=5"]
    assert command_line.main(wrong) == 2
    said = capsys.readouterr().err
    assert re.search(r"record \d+ of .*train-0000.*first_class, the lowest class id", said), said
    assert command_line.main([*wrong, "--first_class=1"]) == 0
    assert labels_of(settings(tmp_path / "out")) == RIGHT
    again = ["data", "convert", f"--source=tfrecord:{tmp_path}/out", f"--output={tmp_path}/again"]
    assert command_line.main([*again, "--first_class=1"]) == 2
    assert "first_class works only with records without a manifest" in capsys.readouterr().err
    assert command_line.main(["data", "verify", f"{tmp_path}/out"]) == 0


def test_the_first_split_fixes_the_lowest_class_id(tmp_path, capsys):
    """Else a split without the highest class would be read one class off."""
    write(tmp_path, imagenet, ("train-0",))
    write(tmp_path, lambda number: imagenet(number - number % 5), ("val-0",))
    given = [f"--source=tfrecord:{tmp_path}", f"--output={tmp_path / 'out'}", "--num_classes=5"]
    given += ["--image_feature=image/encoded", "--label_feature=image/class/label", "--workers=1"]
    assert command_line.main(["data", "convert", *given, "--first_class=1"]) == 0
    val = ["data", "convert", *given, "--split=val"]
    assert command_line.main(val) == 2
    assert "first_class is 1 there, and 0 here" in capsys.readouterr().err
    assert command_line.main([*val, "--first_class=1"]) == 0
    again = ["data", "convert", f"--source=tfrecord:{tmp_path / 'out'}", "--workers=1"]
    assert command_line.main([*again, f"--output={tmp_path / 'again'}"]) == 0
    assert "first_class" not in manifest.read(str(tmp_path / "again")).about


def test_a_conversion_names_an_image_that_cannot_be_decoded(tmp_path):
    def make(number: int) -> bytes:
        data = data_sets.picture(number)
        return record(image=data[: 300 if number == 3 else None], label=0)

    folder = write(tmp_path / "in", make, ("train-0",))
    reader = addresses.build_reader(f"tfrecord:{folder}", ReadOptions(num_classes=1))
    with pytest.raises(UserError, match=r"record 3 of .*train-0: the image cannot be decoded"):
        list(reader.read_examples(reader.parts[0]))


@pytest.mark.slow
def test_images_without_labels_are_predicted(tmp_path):
    def unlabelled(number: int) -> bytes:
        return record(id=str(number).encode(), image__encoded=data_sets.picture(number))

    folder = write(tmp_path / "in", unlabelled, ("test/0.tfrec",))
    data = settings(tmp_path / "none")
    found = input_pipelines.prediction(data, f"tfrecord:{folder}:test")
    [images] = [np.asarray(batch) for batch in found.features([range(4, 8)])]
    assert [len(found.features(r)) for r in ([range(4, 8)], [range(1), range(9)])] == [1, 4]
    assert np.rint(images.mean(axis=(1, 2, 3))).tolist() == [4, 5, 6, 7]
    assert found.read_fields(range(4, 6), ("id",))["id"].tolist() == ["4", "5"]


def test_files_that_hold_no_images_are_named(tmp_path):
    (tmp_path / "train-0").write_text("no records at all")
    with pytest.raises(UserError, match=r"train-0: record 0 is corrupt"):
        input_pipelines.training(settings(tmp_path))
    write(tmp_path, lambda number: b"\xff\xff\xff", ("train-0",))
    with pytest.raises(UserError, match=r"record 0 of .*train-0 is not a tf.train.Example"):
        input_pipelines.training(settings(tmp_path))
    write(tmp_path, flowers, ("train-0",), "GZIP")
    write(tmp_path, flowers, ("train-1",))
    with pytest.raises(UserError, match=r"train-0 .* is compressed, and train-1 is not"):
        input_pipelines.training(settings(tmp_path))
