"""Files of images with a class each, in a folder for each class."""

import collections
import dataclasses
import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence

from tftpu.errors import UserError, counted, find_nearest
from tftpu.input_pipelines.formats import pillow
from tftpu.input_pipelines.reading import listing
from tftpu.input_pipelines.reading.listing import decode_path
from tftpu.storage import files

TRAINING_NAMES = ("train", "training")
VALIDATION_NAMES = ("val", "valid", "validation", "dev", "eval")
SPLIT_NAMES = (*TRAINING_NAMES, *VALIDATION_NAMES, "test", "testing")
_OF_PROGRAMS = ("__MACOSX", "@eaDir", "__pycache__")  # folders made by macOS, a NAS and Python
_SHOWN = 20  # maximum number of names in a line

_EMPTY = "without images"  # the reason for folders; all other reasons are for files

LeftOut = dict[str, list[str]]  # the names of files or folders, by the reason to leave them out


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
        images: the images in order.
        num_classes: the number of class ids.
        class_names: the class names by class id; None if the images have ids only.
        folder: the folder that the images are in.
        left_out: the files in the folder that are not among the images.
        in_folders: whether each class is a folder.
    """

    images: list[ImageFile]
    num_classes: int
    class_names: list[str] | None
    folder: str
    left_out: LeftOut = dataclasses.field(default_factory=dict)
    in_folders: bool = False


@dataclasses.dataclass(frozen=True)
class Splits:
    """The splits of a folder.

    Args:
        classes: the classes of each split.
        left_out: the files that are in no split.
    """

    classes: dict[str, list[str]]
    left_out: LeftOut


def sort_files(folder: str) -> tuple[dict[str, int], LeftOut]:
    """Returns the sizes in bytes of images below a folder, by relative path, and files left out.

    Raises:
        UserError: there is no such folder on this machine.
    """
    tree = listing.scan_folder(folder, follow_links=True)
    sizes = tree.sizes
    if not sizes:
        check_folder(folder)
    hidden = [name for name in sizes if _is_hidden(name)]
    others = [n for n in sizes if not _is_hidden(n) and not n.lower().endswith(pillow.SUFFIXES)]
    unusable = {
        "broken links or special files": tree.unusable,
        "which cannot be read": tree.unreadable,
        "links in a circle": tree.circles,
        _EMPTY: tree.empty,
    }
    left_out = {"hidden": hidden, "not images": others}
    for reason, names in unusable.items():
        left_out[reason] = [name for name in names if not _is_hidden(name)]
    unused = {*hidden, *others}
    found = {name: size for name, size in sizes.items() if name not in unused}
    listing.warn_of_links(folder, tree.links, found)
    return found, left_out


def sort_images(folder: str) -> tuple[dict[str, int], LeftOut]:
    """Calls `sort_files`; raises `UserError` if the folder has no images."""
    found, left_out = sort_files(folder)
    if not found:
        raise UserError(f"There are no images ({', '.join(pillow.SUFFIXES)}) in {folder}.")
    return found, left_out


def check_folder(folder: str, advice: str = "") -> None:
    """Raises `UserError` for a path on this machine that is not a folder.

    Args:
        folder: the path.
        advice: the end of the message.
    """
    if not files.is_remote(folder) and not os.path.isdir(folder):
        raise UserError(_explain_missing_folder(folder) + advice)


def _explain_missing_folder(path: str) -> str:
    """Returns the error message for a path that is not a folder."""
    if os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        return f"{path} is a file, and a folder of images is needed: name its folder, {folder}."
    missing, beside = path.rstrip("/"), os.path.dirname(path.rstrip("/"))
    while beside and not os.path.isdir(beside):
        missing, beside = beside, os.path.dirname(beside)
    others = [entry.name for entry in os.scandir(beside or ".") if entry.is_dir()]
    near = find_nearest(os.path.basename(missing), others)
    hint = f" Did you mean {os.path.join(beside, near)!r}?" if near else ""
    return f"There is no folder {path}: name a folder of images that exists.{hint}"


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part in _OF_PROGRAMS for part in name.split("/"))


def list_splits(folder: str, classes: Sequence[str] = ()) -> Splits:
    """Returns the splits of a folder; there are none if its folders are classes.

    Args:
        folder: local or in a bucket.
        classes: the names of all classes; (): unknown. Folders that all have such names are not
            splits, unless all are named like splits and a folder inside them has such a name.

    Raises:
        UserError: there is no such folder, or folders are named like splits, but may be classes or
            have images without a class.
    """
    found, left_out = sort_files(folder)
    if classes and _has_classes(found, classes):
        return Splits({}, {})
    splits = _find_splits(folder, found)
    beside = {
        reason: [name for name in names if name.split("/")[0] not in splits]
        for reason, names in {**left_out, "in no split": list(found)}.items()
    }
    return Splits(splits, beside if splits else {})


def _has_classes(found: Iterable[str], classes: Sequence[str]) -> bool:
    """Returns whether the folders of images are classes, given the names of all classes."""
    tops: set[str] = set()
    inner: set[str] = set()
    for name in found:
        above = name.split("/")[:-1]
        tops.update(above[:1])
        inner.update(above[1:2])
    # A class may have a split's name: train/bus and train/train are two classes of one split.
    are_splits = all(top.lower() in SPLIT_NAMES for top in tops) and not inner.isdisjoint(classes)
    return tops <= {*classes} and not are_splits


def _find_splits(folder: str, found: Iterable[str]) -> dict[str, list[str]]:
    """Returns the classes of each split; see `list_splits`."""
    inside: dict[str, list[str]] = {}
    for name in found:
        top, slash, rest = name.partition("/")
        if slash:
            inside.setdefault(top, []).append(rest)
    flat = {top for top, rests in inside.items() if not any("/" in rest for rest in rests)}
    names = [top for top in inside if top.lower() in SPLIT_NAMES]
    others = [top for top in inside if top not in names]
    if not names or (others and len(names) == 1 and names[0] in flat):
        return {}
    if others and not (len(names) > 1 and flat.isdisjoint(names) and flat.issuperset(others)):
        raise UserError(
            f"{folder} has folders with names of splits ({_format_some(names)}) and other folders "
            f"({_format_some(others)}), so it is unclear which are the classes. Name the folder "
            f"of one split, such as {folder}/{names[0]}, or leave only splits or only classes in "
            f"{folder}. If all are classes, list them in {_show_classes(inside)}."
        )
    for top in names:
        if top in flat:
            raise UserError(
                f"The folders of {folder} are the splits {_format_some(names)}, but "
                f"{top}/{inside[top][0]} is not in a class's folder. Make a folder for each class "
                "in each split, name the folder of one split that has them, or list images and "
                "labels in an index."
            )
    splits = {
        top: sorted({rest.split("/")[0] for rest in inside[top] if "/" in rest}) for top in names
    }
    for top, classes in splits.items():
        deeper = {rest.split("/")[1] for rest in inside[top] if rest.count("/") > 1}
        # If another split has this folder among several classes, it is a class here as well, and
        # this split just lacks the other classes.
        is_class = any(len(others) > 1 and classes[0] in others for others in splits.values())
        if len(classes) == 1 and len(deeper) > 1 and not is_class:
            raise UserError(
                f"All images of {folder}/{top} are in {classes[0]}, in the folders "
                f"{_format_some(sorted(deeper))}: if these are the classes, name the folder of "
                f"one split, such as {folder}/{top}/{classes[0]}. If {top} is a class, list all "
                f"of {folder} in {_show_classes(inside)}."
            )
    return splits


def _show_classes(names: Collection[str]) -> str:
    """Returns the `classes` option that lists names, quoted for a shell."""
    if len(names) > _SHOWN:  # a shortened list of classes could not be used
        return f"`classes`: the names of all {len(names):,} folders, with commas between them"
    return f"`classes`, as classes={shlex.quote(','.join(sorted(names)))}"


def select_share(found: ImageFiles, fraction: float, held_out: bool) -> ImageFiles:
    """Returns the held-out fraction of the images of each class, or the other images.

    Which images are held out depends only on their names, not on other classes.

    Args:
        found: all images.
        fraction: the fraction of each class that is held out.
        held_out: whether to return the held-out images; otherwise the rest is returned.
    """
    chosen = []
    classes = collections.defaultdict(list)
    for image in found.images:
        classes[image.label].append(image)
    for images in classes.values():
        images.sort(key=lambda image: _hash_name(image.path.removeprefix(f"{found.folder}/")))
        count = round(fraction * len(images))
        chosen += images[:count] if held_out else images[count:]
    kept = set(chosen)
    return dataclasses.replace(found, images=[image for image in found.images if image in kept])


def _hash_name(name: str) -> bytes:
    return hashlib.blake2b(os.fsencode(name), digest_size=16).digest()


def list_in_folders(folder: str, classes: Sequence[str] = ()) -> ImageFiles:
    """Lists the images of a folder that has one subfolder for each class.

    Args:
        folder: local or in a bucket.
        classes: the names of the classes in the order of their ids; empty: the sorted names of the
            subfolders.

    Raises:
        UserError: there are no such subfolders, they look like splits or contain the classes, or
            one is not among `classes`.
    """
    sizes, left_out = sort_files(folder)
    found = [name for name in sizes if "/" in name]
    names = sorted({name.split("/")[0] for name in found})
    if not classes:
        _check_classes(folder, names, found)
    elif unknown := sorted({*names} - {*classes}):
        raise UserError(
            f"{folder} has the folders {_format_some(unknown)}, which are not among the classes of "
            f"the run or the first split: {_format_some(classes)}. Remove these folders, or begin "
            "anew with all classes: train another run, or convert all splits into another folder."
        )
    _check_depth(folder, names, found, classes)
    classes = list(classes) or names
    ids = {name: number for number, name in enumerate(classes)}
    listed = [ImageFile(f"{folder}/{n}", ids[n.split("/")[0]], sizes[n]) for n in found]
    left_out["in no folder of a class"] = [name for name in sizes if "/" not in name]
    return ImageFiles(listed, len(classes), classes, folder, left_out, in_folders=True)


def _check_classes(folder: str, names: list[str], found: list[str]) -> None:
    """Raises `UserError` unless the folders in which images were found are classes."""
    if not names:
        raise UserError(
            f"There are no folders with images ({', '.join(pillow.SUFFIXES)}) in {folder}: there "
            "must be one folder for each class."
        )
    if splits := _find_splits(folder, found):
        raise UserError(
            f"The folders of {folder} are the splits {_format_some(splits)}, not classes: name "
            f"the folder of one split, such as {folder}/{next(iter(splits))}."
        )
    _check_depth(folder, names, found)
    _check_names(folder, found)
    for name in names:
        if name != decode_path(name):
            raise UserError(f"The name of the folder {decode_path(name)} in {folder} is not UTF-8.")


def _check_depth(
    folder: str, names: list[str], found: list[str], classes: Sequence[str] = ()
) -> None:
    """Raises `UserError` if the only folder has several subfolders, which may be the classes.

    Args:
        folder: the folder whose subfolders are checked.
        names, found: the names of the subfolders, and the relative paths of all images in them.
        classes: the names of all classes; empty: unknown.
    """
    inner = sorted({name.split("/")[1] for name in found if name.count("/") > 1})
    if classes and {*classes}.isdisjoint(inner):
        return
    if len(names) == 1 and len(inner) > 1 and all(name.count("/") > 1 for name in found):
        raise UserError(
            f"All images of {folder} are in {names[0]}, in the folders {_format_some(inner)}: if "
            f"these are the classes, name {folder}/{names[0]}. If {names[0]} is the only class, "
            "put its images directly into its folder."
        )


def _check_names(folder: str, found: Iterable[str]) -> None:
    """Raises `UserError` if the names of folders with subfolders look like splits, not classes."""
    inner: dict[str, set[str]] = {}
    for name in found:
        top, *between, _ = name.split("/")
        inner.setdefault(top, set()).update(between[:1] or [""])
    deep = sorted(top for top, names in inner.items() if "" not in names)
    alike = [top for top in deep if is_like_split(top)]
    shared = set.intersection(*inner.values()) if len(deep) == len(inner) > 1 else set()
    if len(alike) > 1 or len(shared) > 1:
        splits = alike if len(alike) > 1 else deep
        raise UserError(
            f"The folders {_format_some(splits)} of {folder} look like splits, not classes: the "
            "images are in folders inside of them, such as "
            f"{_format_some(sorted(inner[splits[0]])[:3])}. Name the folder of one split, which "
            "must have a folder for each class. If they are classes, list them in "
            f"{_show_classes(inner)}."
        )


def is_like_split(name: str) -> bool:
    """Returns whether a name's first or last word is a split, as in seg_train or val2017."""
    words = re.findall(r"[a-z]+", name.lower())
    return bool({*words[:1], *words[-1:]} & {*SPLIT_NAMES})


def describe(found: ImageFiles) -> list[str]:
    """Returns lines about each class's images, classes without any, and folders in a class."""
    counts = collections.Counter(image.label for image in found.images)
    names = found.class_names or [str(number) for number in range(found.num_classes)]
    said = [f"{name} {counts[number]:,}" for number, name in enumerate(names)]
    images, classes = counted(len(found.images), "image"), counted(len(names), "class")
    lines = [f"{images} in {classes}: {_format_some(said)}"]
    if missing := [name for number, name in enumerate(names) if not counts[number]]:
        lines.append(f"There are no images of {_format_some(missing)}.")
    inner = set()
    for image in found.images if found.in_folders else ():
        above = image.path.removeprefix(f"{found.folder}/").split("/")[:-1]
        if len(above) > 1:
            inner.add("/".join(above[:2]))
    if inner:
        lines.append(
            "Images in folders inside of a class are of this class: "
            f"{_format_some(map(decode_path, sorted(inner)))}."
        )
    return lines


def describe_left_out(left_out: LeftOut) -> list[str]:
    """Returns a line for each reason to leave files out."""
    return [
        f"Left out {counted(len(names), 'folder' if reason == _EMPTY else 'file')}, {reason}: "
        f"{_format_some(map(decode_path, names))}"
        for reason, names in left_out.items()
        if names
    ]


def _format_some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
