"""An index of images: a table (CSV, TSV, JSON) with the columns image and label."""

import os
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import text_files
from tftpu.input_pipelines.formats.manifest import OTHER_FOLDER
from tftpu.input_pipelines.formats.text_files import Row
from tftpu.input_pipelines.reading import listing
from tftpu.input_pipelines.reading.image_files import ImageFile, ImageFiles
from tftpu.storage import files

_ID = re.compile(r"(-?[0-9]+)(\.0*)?")  # pandas writes ids as 3.0 if a label is missing
_MOST_CLASSES = 1 << 24  # more class ids are a mistake, and would need a model of many GB


def list_in_index(path: str, classes: Sequence[str] = (), num_classes: int = 0) -> ImageFiles:
    """Lists the images that a table names, in its columns image and label.

    An image is a path relative to the folder of the table. With `classes`, labels are names;
    otherwise they are class ids if `num_classes` is set or all of them are whole numbers.

    Args:
        path: the path of the table; see `text_files`.
        classes: the names of the classes in the order of their ids; (): the sorted labels of the
            table.
        num_classes: the number of class ids; 0: one more than the highest in the table.

    Raises:
        UserError: the file is not valid, an image is missing, or a label is not one of the classes;
            the message names the record.
    """
    folder = os.path.dirname(path) or "."
    # Reads the table first: if it is missing, its folder is not listed.
    rows = list(text_files.read_rows(path, skip_spaces=True))
    tree = listing.scan_folder(folder)
    images = [_read_image(row, folder, tree.sizes) for row in rows]
    listing.warn_of_links(folder, tree.links, images)
    labels = [_read_label(row) for row in rows]
    if not classes and (num_classes or all(map(_ID.fullmatch, labels))):
        ids = [_parse_class_id(row.place, label, num_classes) for row, label in zip(rows, labels)]
        found, names = num_classes or max(ids, default=-1) + 1, None
    else:
        names = list(classes) or sorted(set(labels))
        known = {name: number for number, name in enumerate(names)}
        ids = [_find_class_id(row.place, label, known) for row, label in zip(rows, labels)]
        found = len(names)
    return ImageFiles(
        [ImageFile(f"{folder}/{name}", n, tree.sizes[name]) for name, n in zip(images, ids)],
        found,
        names,
        folder,
    )


def find_index(folder: str, split: str) -> str:
    """Returns the path of a split's index: the table SPLIT.csv, SPLIT.tsv, ... in a folder.

    Raises:
        UserError: there is no such table, or more than one.
    """
    names = [name for name in files.list_names(folder) if _is_index(name, split)]
    if len(names) != 1:
        raise UserError(
            f"{folder} has {' and '.join(names) or 'no index'} for the split {split!r}: give the "
            f"split a single table, such as {split}.csv (or {', '.join(text_files.TABLES[1:])})."
            f"{'' if names else f' {OTHER_FOLDER}'}"
        )
    return files.join(folder, names[0])


def _is_index(name: str, split: str) -> bool:
    suffix = text_files.find_suffix(name)
    stem = name[: name.lower().rfind(suffix)] if suffix in text_files.TABLES else ""
    return stem == split


def _read_value(row: Row, column: str) -> Any:
    value = row.values.get(column)
    if value is None or value == "":
        has = f" It has {', '.join(row.values)}." if column not in row.values else ""
        raise UserError(
            f"{row.place} has no {column!r}: an index needs the columns image and label.{has}"
        )
    if type(value) not in (str, int, float) or (type(value) is float and not value.is_integer()):
        raise UserError(
            f"{row.place}: image must be a text, and label must be a text or a whole number."
        )
    return value


def _read_image(row: Row, folder: str, sizes: dict[str, int]) -> str:
    image = _read_value(row, "image")
    if not isinstance(image, str):
        raise UserError(
            f"{row.place}: image must be a text, and label must be a text or a whole number."
        )
    name = image if image in sizes else posixpath.normpath(image)  # `find` lists it as ./a.png
    if (slashed := name.replace("\\", "/")) in sizes and name not in sizes:
        raise UserError(
            f"{row.place} has the image {image} with Windows separators: write paths with '/', "
            f"here {slashed}."
        )
    if name not in sizes:
        leads_out = name.startswith(("/", "../"))
        inside = " Paths are relative to the folder of the index, and lead to files below it."
        raise UserError(
            f"{row.place}: there is no image {image} in {folder}.{inside if leads_out else ''}"
        )
    return name


def _read_label(row: Row) -> str:
    label = str(_read_value(row, "label")).strip()  # spaces around a name do not belong to it
    if not label:
        raise UserError(f"{row.place} has no 'label': it is blank.")
    return label


def _parse_class_id(place: str, label: str, num_classes: int) -> int:
    match = _ID.fullmatch(label)
    if not match:
        raise UserError(
            f"{place} has the label {label[:20]!r}, but the other labels are class ids."
        )
    number = int(match[1]) if len(match[1]) < 12 else -1
    if not 0 <= number < _MOST_CLASSES:
        raise UserError(
            f"{place} has the label {label[:20]}: a class id must be 0 or more, and below "
            f"{_MOST_CLASSES:,}."
        )
    if num_classes and number >= num_classes:
        raise UserError(
            f"{place} has the class id {number}, but classes are numbered 0 to {num_classes - 1}: "
            f"correct the id, or set num_classes to {number + 1} for all splits of the data set."
        )
    return number


def _find_class_id(place: str, label: str, known: dict[str, int]) -> int:
    if label not in known:
        some = ", ".join(list(known)[:20])
        ids = " Class ids need no names: leave `classes` out, or write names in the index."
        raise UserError(
            f"{place} has the label {label[:80]!r}, which is not one of the {len(known)} classes "
            f"({some}{', …' if len(known) > 20 else ''}).{ids if _ID.fullmatch(label) else ''}"
        )
    return known[label]
