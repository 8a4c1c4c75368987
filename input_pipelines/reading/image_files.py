"""Files of images with a class each, in a folder for each class."""

import dataclasses
import hashlib
from collections.abc import Sequence

from tftpu.errors import UserError
from tftpu.input_pipelines.reading import listing

SUFFIXES = (".jpg", ".jpeg", ".png")
TRAINING_NAMES = ("train", "training")
VALIDATION_NAMES = ("val", "valid", "validation", "dev", "eval")
SPLIT_NAMES = (*TRAINING_NAMES, *VALIDATION_NAMES, "test", "testing")


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
    names = sorted({name.split("/")[0] for name in found})
    if classes and (unknown := sorted({*names} - {*classes})):
        raise UserError(f"{folder} has the folders {unknown}, which are none of the classes.")
    classes = list(classes) or names
    if not classes:
        raise UserError(
            f"There are no folders of images ({', '.join(SUFFIXES)}) in {folder}: one for each "
            "class is expected."
        )
    ids = {name: number for number, name in enumerate(classes)}
    images = [ImageFile(f"{folder}/{n}", ids[n.split("/")[0]], sizes[n]) for n in found]
    return ImageFiles(images, len(classes), classes, folder)
