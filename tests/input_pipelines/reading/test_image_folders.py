"""Folders of images as real ones are: hidden folders, splits, strange files; read or named."""

import errno
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.data import data_sets
from tests.support.data.conversions import examples, one
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines.reading import image_files, image_index, listing
from tftpu.input_pipelines.sources import Augment, StreamedImages
from tftpu.launch import main as command_line


def write(root: Path, *names: str) -> str:
    """Writes an image to each of these paths, its grey level the number of the path."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data_sets.picture(number, kind="PNG"))
    return str(root)


def labels(folder: str, *classes: str) -> dict[str, str]:
    """Returns the class that is found for each image."""
    found = image_files.list_in_folders(folder, classes)
    assert found.class_names
    return {
        image.path.removeprefix(f"{folder}/"): found.class_names[image.label]
        for image in found.images
    }


def convert(source: str, output: Path, *flags: str) -> int:
    arguments = [f"--source={source}", f"--output={output}", "--workers=1", *flags]
    return command_line.main(["data", "convert", *arguments])


SPLITS = ("train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png")


@pytest.mark.parametrize(
    "beside", [".ipynb_checkpoints/1.png", "__MACOSX/train/cat/._1.png", "unlabeled/9.png", "x.jpg"]
)
def test_a_folder_or_file_beside_the_splits_does_not_make_them_classes(tmp_path, capsys, beside):
    folder = write(tmp_path / "photos", *SPLITS, beside)
    assert image_files.list_splits(folder).classes == {
        "train": ["cat", "dog"],
        "val": ["cat", "dog"],
    }
    assert convert(f"images:{folder}", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "Left out 1 file, " in said and beside in said
    assert "train: 2 images in 2 classes: cat 1, dog 1\n" in said
    made = [
        sorted(
            (one(e, "source"), one(e, "label"))
            for shard in examples(tmp_path / "out", split)
            for e in shard
        )
        for split in ("train", "val")
    ]
    assert made == [[(b"cat/1.png", 0), (b"dog/2.png", 1)], [(b"cat/3.png", 0), (b"dog/4.png", 1)]]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*SPLITS, "extra/cat/9.png"], r"of splits \(train, val\) and other folders \(extra\)"),
        (["train/cat/1.png", "car/2.png"], r"of splits \(train\) and other folders \(car\)"),
        (
            ["train/1.png", "val/2.png", "car/3.png"],
            r"splits \(train, val\) and other folders \(car\)",
        ),
        ([*SPLITS, "test/9.png"], "test/9.png is not in a class's folder"),
        (SPLITS, "are the splits train, val, not classes: name the folder of one split, such as"),
        (["photos/cat/1.png", "photos/dog/2.png"], "in photos, in the folders cat, dog: if these"),
        (["1.png"], "There are no folders with images"),
        (
            [
                f"seg_{split}/seg_{split}/{name}/1.png"
                for split in ("train", "test")
                for name in "ab"
            ]
            + ["seg_pred/seg_pred/1.png"],
            "The folders seg_test, seg_train of .* look like splits, not classes",
        ),
        (
            ["training_set/cat/1.png", "test_set/cat/2.png", "single/3.png"],
            "The folders test_set, training_set of .* look like splits",
        ),
        (
            ["one/cat/1.png", "one/dog/2.png", "two/cat/3.png", "two/dog/4.png"],
            "The folders one, two of .*, such as cat, dog. .* in `classes`, as classes=one,two",
        ),
        (
            ["train/train/cat/1.png", "train/train/dog/2.png", "val/val/cat/3.png"],
            "All images of .*/train are in train, in the folders cat, dog",
        ),
    ],
)
def test_a_layout_that_can_mean_two_things_is_an_error(tmp_path, names, message):
    folder = write(tmp_path / "all", *names)
    with pytest.raises(UserError, match=message):
        image_files.list_in_folders(folder)
    write(tmp_path / "data" / "train", *names)
    data = StreamedImages(format="folder", data_dir=str(tmp_path / "data"), num_classes=2)
    with pytest.raises(UserError, match=message):
        input_pipelines.training(data)


@pytest.mark.parametrize(
    "names",
    [
        ["steam_train/1.png", "fast_train/2.png", "bus/3.png"],
        ["cat/images/1.png", "dog/images/2.png"],
        ["cat/2020/1.png", "cat/2021/2.png", "dog/2020/3.png", "dog/2021/4.png", "dog/5.png"],
    ],
)
def test_classes_may_have_folders_and_names_of_splits_in_theirs(tmp_path, names):
    folder = write(tmp_path, *names)
    assert labels(folder) == {name: name.split("/")[0] for name in names}


def test_classes_that_are_listed_are_no_splits(tmp_path):
    names = ["one/cat/1.png", "one/dog/2.png", "two/cat/3.png", "two/dog/4.png"]
    folder = write(tmp_path, *names)
    assert labels(folder, "one", "two") == {name: name.split("/")[0] for name in names}
    assert convert(f"images:{folder}", tmp_path / "out", "--classes=one,two") == 0


def test_a_class_named_like_a_split_is_read_once_all_classes_are_listed(tmp_path, capsys):
    names = ["big bus/1.png", "train/2020/2.png", "train/2021/3.png"]
    folder = write(tmp_path / "in", *names)
    assert convert(f"images:{folder}", tmp_path / "out") == 2
    assert "`classes`, as classes='big bus,train'.\n" in capsys.readouterr().err
    assert convert(f"images:{folder}", tmp_path / "out", "--classes=big bus, train") == 0
    read = [labels(folder, "big bus", "train")[name] for name in names]
    assert read == ["big bus", "train", "train"]
    write(tmp_path / "in", *(f"{number}/1.png" for number in range(19)))
    with pytest.raises(UserError, match="`classes`: the names of all 21 folders, with commas"):
        labels(folder)


@pytest.mark.parametrize("beside", [(), ("val/car/4.png", "val/train/5.png")])
def test_a_split_may_have_a_class_of_its_own_name(tmp_path, beside):
    names = ["train/bus/1.png", "train/car/2.png", "train/train/3.png", *beside]
    folder = write(tmp_path / "in", *names)
    assert convert(f"images:{folder}", tmp_path / "out", "--classes=bus,car,train") == 0
    made = examples(tmp_path / "out")
    read = {one(e, "source"): one(e, "label") for shard in made for e in shard}
    assert read == {b"bus/1.png": 0, b"car/2.png": 1, b"train/3.png": 2}
    with pytest.raises(UserError, match="are in train, in the folders bus, car, train: if these"):
        labels(write(tmp_path / "train", *names[:3]), "bus", "car", "train")


def test_a_share_of_images_with_names_of_any_bytes_is_held_out(tmp_path):
    folder = write(tmp_path / "all", *(f"cat/{n}.png" for n in range(8)), "dog/0.png")
    os.rename(tmp_path / "all/cat/0.png", os.fsencode(tmp_path) + b"/all/cat/\xfe.png")
    assert convert(f"images:{folder}", tmp_path / "out", "--validation_fraction=0.5") == 0


def test_hidden_folders_and_files_take_no_class_id(tmp_path):
    shown = ["cat/1.png", "dog/a b/ü.PNG", "fox/x.JPEG"]
    hidden = [".a/1.png", "__MACOSX/cat/1.png", "cat/.x.png", "dog/.ipynb_checkpoints/2-copy.png"]
    folder = write(tmp_path, *shown, *hidden, "0.png", "ape/Thumbs.db", "cat/1.txt")
    assert labels(folder) == {"cat/1.png": "cat", "dog/a b/ü.PNG": "dog", "fox/x.JPEG": "fox"}
    found = image_files.list_in_folders(folder)
    assert found.class_names == ["cat", "dog", "fox"]
    assert {reason: sorted(names) for reason, names in found.left_out.items()} == {
        "hidden": sorted(hidden),
        "not images": ["ape/Thumbs.db", "cat/1.txt"],
        "in no folder of a class": ["0.png"],
        "broken links or special files": [],
        "which cannot be read": [],
        "links in a circle": [],
        "without images": [],
    }


def test_dead_links_and_empty_folders_are_named(tmp_path, capsys):
    folder = write(tmp_path / "photos", *SPLITS)
    train = tmp_path / "photos" / "train"
    (train / "ant").symlink_to(tmp_path / "nowhere")
    (train / "cat" / "dead.png").symlink_to(tmp_path / "nowhere.png")
    for empty in ("cat/adir.png", "owl/a/b", "owl/c", ".cache"):
        (train / empty).mkdir(parents=True)
    (tmp_path / "photos" / "test").mkdir()
    assert convert(f"images:{folder}", tmp_path / "out") == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "Left out" in line] == [
        "Left out 1 folder, without images: test",
        "train: Left out 2 files, broken links or special files: ant, cat/dead.png",
        "train: Left out 2 folders, without images: cat/adir.png, owl",
    ]


def test_folders_inside_of_a_class_are_named(tmp_path):
    names = ["animal/cat/1.png", "animal/dog/2.png", "vehicle/3.png"]
    found = image_files.list_in_folders(write(tmp_path, *names))
    assert image_files.describe(found) == [
        "3 images in 2 classes: animal 2, vehicle 1",
        "Images in folders inside of a class are of this class: animal/cat, animal/dog.",
    ]


def test_one_image_of_one_class_in_one_shard_is_called_so(tmp_path, capsys):
    folder = write(tmp_path / "in", "cat/1.png")
    assert convert(f"images:{folder}", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "1 image in 1 class: cat 1\n1 part to read, 0 of them done\n1 example, " in said
    assert "1 example, 147 B: 1 shard\n" in said


def test_folders_inside_of_many_classes_are_named_in_one_line(tmp_path):
    names = [f"n{number:02}/images/1.png" for number in range(25)]
    said = image_files.describe(image_files.list_in_folders(write(tmp_path, *names)))
    assert len(said) == 2
    assert said[1].endswith("n18/images, n19/images and 5 more.")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cat/1.png", r"cat/1\.png is a file, and a folder of images is needed: .*/cat\.$"),
        ("nowhere", r"There is no folder .*/nowhere: name a folder of images that exists\.$"),
    ],
)
def test_what_is_no_folder_is_an_error(tmp_path, name, message):
    path = f"{write(tmp_path, 'cat/1.png')}/{name}"
    with pytest.raises(UserError, match=message):
        image_files.list_splits(path)
    with pytest.raises(UserError, match=message):
        image_files.list_in_folders(path)


def test_classes_that_are_given_keep_their_ids_and_take_no_others(tmp_path):
    folder = write(tmp_path, "cat/1.png", "owl/2.png")
    found = image_files.list_in_folders(folder, ["ant", "cat", "owl"])
    assert [image.label for image in found.images] == [1, 2]
    assert image_files.describe(found) == [
        "2 images in 3 classes: ant 0, cat 1, owl 1",
        "There are no images of ant.",
    ]
    with pytest.raises(UserError, match=r"the folders owl, which are not .*: ant, cat\. Remove"):
        image_files.list_in_folders(folder, ["ant", "cat"])


def test_a_split_may_have_one_class_with_folders_in_it(tmp_path, capsys):
    names = ["train/a/1.png", "train/b/2.png", "val/a/x/3.png", "val/a/y/4.png"]
    folder = write(tmp_path / "in", *names)
    assert convert(f"images:{folder}", tmp_path / "out") == 0
    assert "2 images in 2 classes: a 2, b 0" in capsys.readouterr().out
    write(tmp_path / "in", "test/images/a/5.png", "test/images/b/6.png")
    with pytest.raises(UserError, match=r"All images of .*/in/test are in images, in the folders"):
        image_files.list_splits(folder)


def test_links_to_folders_are_followed_and_circles_are_not(tmp_path):
    write(tmp_path / "all", "cat/1.png", "dog/2.png")
    few = tmp_path / "few"
    few.mkdir()
    (few / "cat").symlink_to(tmp_path / "all" / "cat")
    (few / "puss").symlink_to(tmp_path / "all" / "cat")
    (tmp_path / "all" / "cat" / "up").symlink_to(tmp_path / "all")
    (tmp_path / "all" / "cat" / "few").symlink_to(few)
    (few / "self.png").symlink_to(few / "self.png")
    found = listing.scan_folder(str(few), follow_links=True)
    assert {"cat/1.png", "puss/1.png"} <= set(found.sizes)
    assert max(name.count("/") for name in found.sizes) < 8
    assert {"cat/few", "puss/few", "cat/up/cat", "self.png"} <= set(found.circles)
    assert not found.unusable
    _, left_out = image_files.sort_files(str(few))
    assert any(" links in a circle: cat/few" in s for s in image_files.describe_left_out(left_out))


def test_links_that_lead_out_of_the_folder_are_read_and_named_once(tmp_path, caplog):
    elsewhere = Path(write(tmp_path / "private", "1.png", "2.png"))
    folder = write(tmp_path / "in", "dog/3.png", "own/4.png")
    (tmp_path / "in" / "cat").symlink_to(elsewhere)
    (tmp_path / "in" / "dog" / "5.png").symlink_to(elsewhere / "1.png")
    (tmp_path / "in" / "dog" / "6.png").symlink_to(tmp_path / "in" / "own" / "4.png")
    for _ in range(2):
        assert len(labels(folder)) == 6
    [said] = [record.getMessage() for record in caplog.records]
    assert f"cat is a link to {elsewhere}, dog/5.png is a link to {elsewhere}/1.png." in said
    (tmp_path / "in" / "t.csv").write_text("image,label\ndog/5.png,0\ndog/6.png,0\n")
    image_index.list_in_index(f"{folder}/t.csv")
    assert caplog.text.count("dog/5.png is a link") == 2 and "6.png" not in caplog.text


def test_links_that_were_not_followed_are_no_links_that_stay_inside(tmp_path, monkeypatch, caplog):
    elsewhere = Path(write(tmp_path / "private", "1.png"))
    write(tmp_path / "in", "dog/1.png")
    for number in range(2, 5):
        (tmp_path / "in" / "dog" / f"{number}.png").symlink_to(elsewhere / "1.png")
    for followed, said in ((3, "/1.png."), (2, "/1.png (only the first 2 links to images were")):
        monkeypatch.setattr(listing, "_CHECKED", followed)
        image_files.sort_files(str(tmp_path / "in"))
        assert f"dog/{1 + followed}.png is a link to {elsewhere}{said}" in caplog.text


def test_a_listing_asks_for_each_file_once_and_for_few_links(tmp_path, monkeypatch):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "in").mkdir()
    for number in range(20):
        (tmp_path / "blobs" / f"{number}.png").touch()
        (tmp_path / "in" / f"{number:02}.png").symlink_to(tmp_path / "blobs" / f"{number}.png")
    asked = []
    for name in ("stat", "lstat", "readlink"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path, *a, real=real, **k: asked.append(path) or real(path, *a, **k)
        )
    monkeypatch.setattr(listing, "_CHECKED", 5)
    assert len(image_files.sort_files(str(tmp_path))[0]) == 40
    looked_at = {path for path in map(str, asked) if path.endswith(".png")}
    # The sizes are asked of what `os.scandir` yields: here are only the links that are followed.
    assert {os.path.dirname(p) for p in looked_at} == {f"{tmp_path}/in", f"{tmp_path}/blobs"}
    assert len(looked_at) == 10


def test_a_file_that_cannot_be_read_is_called_so(tmp_path, monkeypatch):
    folder = write(tmp_path, "cat/1.png", "cat/2.png", "cat/3.png")
    examine = listing._examine_entry

    class Denied:
        def is_dir(self):
            return False

        def stat(self):
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(
        listing, "_examine_entry", lambda e: examine(Denied() if e.name == "2.png" else e)
    )
    found, left_out = image_files.sort_files(folder)
    assert list(found) == ["cat/1.png", "cat/3.png"]
    assert image_files.describe_left_out(left_out) == [
        "Left out 1 file, which cannot be read: cat/2.png"
    ]


def test_a_class_whose_name_is_no_text_is_an_error(tmp_path):
    folder = write(tmp_path, "cat/1.png", "dog/2.png")
    os.rename(tmp_path / "dog", os.fsencode(tmp_path) + b"/\xfe")
    with pytest.raises(UserError, match="The name of the folder \ufffd in"):
        image_files.list_in_folders(folder)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> Path:
    """Writes one class for each suffix, each an image of one grey level; returns the folder."""
    root = tmp_path_factory.mktemp("kinds")
    kinds = ["a.gif", "b.webp", "c.tif", "d.TIFF", "e.bmp", "f.jfif", "g.jpe", "h.JPG", "i.Png"]
    for number, name in enumerate(kinds):
        for split in ("train", "val"):
            (root / split / name[0]).mkdir(parents=True)
            pixels = np.full((12, 16, 3), 20 * number, np.uint8)
            form = {"f": "JPEG", "g": "JPEG", "h": "JPEG"}.get(name[0])
            Image.fromarray(pixels).save(root / split / name[0] / name, form)
    shutil.copy(root / "train/i/i.Png", os.fsencode(root) + b"/train/i/\xff.png")  # no text
    (root / "train" / "a" / "scan.heic").write_bytes(b"\0\0\0\x18ftypheic")
    return root


def levels(data: StreamedImages) -> dict[int, int]:
    """Returns the grey level of the image of each class."""
    found = {}
    for images, classes in input_pipelines.evaluation(data):
        found |= dict(
            zip(classes.numpy().tolist(), images.numpy().mean((1, 2, 3)).round().tolist())
        )
    return found


@pytest.mark.slow
def test_images_of_all_formats_are_streamed_and_converted_alike(kinds, tmp_path, capsys, caplog):
    plain = {"image_size": 8, "num_classes": 9, "image_dtype": "uint8", "global_batch_size": 4}
    plain |= {"augment": Augment(crop=False, flip=False), "eval_split": "train"}
    expected = {number: 20 * number for number in range(9)}
    with caplog.at_level(logging.WARNING):
        data = StreamedImages(format="folder", data_dir=str(kinds), **plain)
        assert levels(data) == expected
        assert "not images: a/scan.heic" in caplog.text
    assert convert(f"images:{kinds}", tmp_path / "out") == 0
    assert "Left out 1 file, not images: a/scan.heic" in capsys.readouterr().out
    assert (
        levels(StreamedImages(format="tfrecord", data_dir=str(tmp_path / "out"), **plain))
        == expected
    )
    for shard in examples(tmp_path / "out"):  # other programs need not know other formats
        assert all(one(e, "image").startswith((b"\xff\xd8\xff", b"\x89PNG")) for e in shard)
    assert command_line.main(["data", "verify", str(tmp_path / "out"), "--workers=1"]) == 0
