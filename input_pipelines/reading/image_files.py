"""Files of images with a class each: a folder per class, or an index that names them."""

import csv
import dataclasses
import hashlib
import io
import os
import re
from collections.abc import Sequence

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import lines, tfrecord
from tftpu.input_pipelines.reading import listing

SUFFIXES = (".jpg", ".jpeg", ".png")
TRAINING_NAMES = ("train", "training")
VALIDATION_NAMES = ("val", "valid", "validation", "dev", "eval")
SPLIT_NAMES = (*TRAINING_NAMES, *VALIDATION_NAMES, "test", "testing")
_NUMBER = re.compile(r"-?[0-9]+")
_MOST_CLASSES = 1 << 24  # of class ids; more is a mistake, and would be a model of many GB


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """An image on disk or in a bucket, with its class id and its size in bytes."""

    path: str
    label: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class ImageFiles:
    """Images in order, and their classes.

    Args:
        images: in order.
        num_classes: of the class ids.
        class_names: by class id; None if the images have ids only.
        folder: that the images are in.
    """

    images: list[ImageFile]
    num_classes: int
    class_names: list[str] | None
    folder: str


def splits_in(folder: str) -> dict[str, list[str]]:
    """Returns the classes of each split of a folder of splits; {} if its folders are classes.

    Raises:
        UserError: the folders are named like splits, and images lie in them without a class.
    """
    found = [name for name in listing.tree(folder) if name.lower().endswith(SUFFIXES)]
    names = sorted({name.split("/")[0] for name in found if "/" in name})
    if not names or any(name.lower() not in SPLIT_NAMES for name in names):
        return {}
    for name in found:
        if name.count("/") == 1:
            raise UserError(
                f"The folders of {folder} are the splits {', '.join(names)}, and {name} is in no "
                "folder of a class: make a folder for each class in each split, or name images and "
                "labels in an index (index:FILE)."
            )
    return {
        name: sorted({image.split("/")[1] for image in found if image.startswith(f"{name}/")})
        for name in names
    }


def share(found: ImageFiles, fraction: float, held_out: bool) -> ImageFiles:
    """Returns a share of the images of each class, or the rest.

    Which images are held out depends on their names only, and not on the other classes.

    Args:
        found: all images.
        fraction: of each class that is held out.
        held_out: whether to return that share; else the rest.
    """
    chosen = []
    for label in range(found.num_classes):
        images = [image for image in found.images if image.label == label]
        images.sort(key=lambda image: _drawn(image.path.removeprefix(f"{found.folder}/")))
        count = round(fraction * len(images))
        chosen += images[:count] if held_out else images[count:]
    kept = set(chosen)
    return dataclasses.replace(found, images=[image for image in found.images if image in kept])


def _drawn(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def in_folders(folder: str, classes: Sequence[str] = ()) -> ImageFiles:
    """Lists the images of a folder that has one subfolder for each class.

    Args:
        folder: local or in a bucket.
        classes: names in the order of their ids; empty: those of the subfolders, sorted.

    Raises:
        UserError: there are no such subfolders.
    """
    sizes = listing.tree(folder)
    found = [name for name in sizes if name.lower().endswith(SUFFIXES) and "/" in name]
    classes = list(classes) or sorted({name.split("/")[0] for name in found})
    if not classes:
        raise UserError(
            f"There are no folders of images ({', '.join(SUFFIXES)}) in {folder}: one for each "
            "class is expected."
        )
    ids = {name: number for number, name in enumerate(classes)}
    images = [ImageFile(f"{folder}/{n}", ids[n.split("/")[0]], sizes[n]) for n in found]
    return ImageFiles(images, len(classes), classes, folder)


def in_index(path: str) -> ImageFiles:
    """Lists the images that a CSV or JSON-lines file names, in its columns image and label.

    Raises:
        UserError: the file is not valid, or an image is missing; names the record.
    """
    with tfrecord.opened(path) as file:
        text = lines.utf8(file.read(), path).removeprefix("\ufeff").splitlines()  # as Excel writes
    if path.endswith(".csv"):
        rows = _csv_rows(text, path)
    else:
        rows = [lines.json_object(line, f"line {n} of {path}") for n, line in enumerate(text, 1)]
    folder = os.path.dirname(path) or "."
    sizes = listing.tree(folder)
    labels = []
    for number, row in enumerate(rows, 1):
        image, label = row.get("image"), row.get("label")
        if image in (None, "") or label in (None, ""):
            missing = "image" if image in (None, "") else "label"
            raise UserError(
                f"Record {number} of {path} has no {missing!r}: an index needs the columns "
                "image and label."
            )
        if not isinstance(image, str) or type(label) not in (str, int):
            raise UserError(
                f"Record {number} of {path}: image must be a text, and label a text or a whole "
                "number."
            )
        if image not in sizes:
            raise UserError(f"Record {number} of {path}: there is no image {image} in {folder}.")
        labels.append(str(label))
    names = None
    if all(_NUMBER.fullmatch(label) for label in labels):  # class ids, not names
        ids = [_class_id(label, f"Record {n} of {path}") for n, label in enumerate(labels, 1)]
    else:
        names = sorted(set(labels))
        known = {name: number for number, name in enumerate(names)}
        ids = [known[label] for label in labels]
    images = [
        ImageFile(f"{folder}/{row['image']}", label, sizes[row["image"]])
        for row, label in zip(rows, ids)
    ]
    return ImageFiles(images, max(ids, default=0) + 1, names, folder)


def _csv_rows(text: list[str], path: str) -> list[dict[str, str]]:
    reader = csv.DictReader(io.StringIO("\n".join(text)))
    try:
        return list(reader)
    except csv.Error as error:
        raise UserError(f"{path} is not CSV after line {reader.line_num}: {error}.") from error


def _class_id(label: str, place: str) -> int:
    number = int(label) if len(label) < 12 else -1
    if not 0 <= number < _MOST_CLASSES:
        raise UserError(
            f"{place} has the label {label[:20]}: a class id is 0 or more, and below "
            f"{_MOST_CLASSES:,}."
        )
    return number
