"""Files of images with a class each: a folder per class, or an index that names them."""

import csv
import dataclasses
import io
import os

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import lines, tfrecord
from tftpu.input_pipelines.reading import listing

SUFFIXES = (".jpg", ".jpeg", ".png")


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
    """

    images: list[ImageFile]
    num_classes: int
    class_names: list[str] | None


def in_folders(folder: str) -> ImageFiles:
    """Lists the images of a folder that has one subfolder for each class.

    Raises:
        UserError: there are no such subfolders.
    """
    sizes = listing.tree(folder)
    found = [name for name in sizes if name.lower().endswith(SUFFIXES) and "/" in name]
    classes = sorted({name.split("/")[0] for name in found})
    if not classes:
        raise UserError(
            f"There are no folders of images ({', '.join(SUFFIXES)}) in {folder}: one for each "
            "class is expected."
        )
    ids = {name: number for number, name in enumerate(classes)}
    images = [ImageFile(f"{folder}/{n}", ids[n.split("/")[0]], sizes[n]) for n in found]
    return ImageFiles(images, len(classes), classes)


def in_index(path: str) -> ImageFiles:
    """Lists the images that a CSV or JSON-lines file names, in its columns image and label.

    Raises:
        UserError: the file is not valid, or an image is missing; names the record.
    """
    with tfrecord.opened(path) as file:
        text = lines.utf8(file.read(), path).removeprefix("\ufeff").splitlines()  # as Excel writes
    if path.endswith(".csv"):
        rows = list(csv.DictReader(io.StringIO("\n".join(text))))
    else:
        rows = [lines.json_object(line, f"line {n} of {path}") for n, line in enumerate(text, 1)]
    folder = os.path.dirname(path) or "."
    sizes = listing.tree(folder)
    for number, row in enumerate(rows, 1):
        for column in ("image", "label"):
            if row.get(column) in (None, ""):
                raise UserError(
                    f"Record {number} of {path} has no {column!r}: an index needs the columns "
                    "image and label."
                )
        if row["image"] not in sizes:
            raise UserError(
                f"Record {number} of {path}: there is no image {row['image']} in {folder}."
            )
    labels = [str(row["label"]) for row in rows]
    names = None
    if all(label.isdigit() for label in labels):  # class ids, not names
        ids = [int(label) for label in labels]
    else:
        names = sorted(set(labels))
        known = {name: number for number, name in enumerate(names)}
        ids = [known[label] for label in labels]
    images = [
        ImageFile(f"{folder}/{row['image']}", label, sizes[row["image"]])
        for row, label in zip(rows, ids)
    ]
    return ImageFiles(images, max(ids, default=0) + 1, names)
