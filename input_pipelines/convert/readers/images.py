"""Files of images, in a folder per class or named by an index."""

from collections.abc import Iterator

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.readers.reader import (
    Example,
    OrderedReader,
    Part,
    ReadOptions,
)
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.reading import image_files
from tftpu.input_pipelines.reading.image_files import ImageFiles

PART_EXAMPLES = 512  # images of a part
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


class ImageReader(OrderedReader):
    """Image files as examples {"image", "label"}.

    Args:
        found: the files.
    """

    def __init__(self, found: ImageFiles):
        features = {
            "image": Feature("string", (), "image"),
            "label": Feature("int32", (), num_classes=found.num_classes),
        }
        rows = [[image.path, image.label, image.bytes] for image in found.images]
        parts = [rows[i : i + PART_EXAMPLES] for i in range(0, len(rows), PART_EXAMPLES)]
        super().__init__(
            features, parts, {"classes": found.class_names} if found.class_names else {}
        )

    def examples(self, part: Part) -> Iterator[Example]:
        for path, label, _ in part:
            with tfrecord.opened(path) as file:
                data = file.read()
            if not data.startswith(_MAGIC):
                raise UserError(f"{path} is neither a JPEG nor a PNG.")
            yield {"image": data, "label": label}


def of_folders(folder: str, options: ReadOptions) -> ImageReader:
    """Returns a reader of a folder with one subfolder of images for each class."""
    return ImageReader(image_files.in_folders(folder))


def of_index(path: str, options: ReadOptions) -> ImageReader:
    """Returns a reader of the images that a CSV or JSON-lines file names."""
    return ImageReader(image_files.in_index(path))
