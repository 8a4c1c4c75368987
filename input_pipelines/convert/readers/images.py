"""Files of images, in a folder per class or named by an index."""

from collections.abc import Iterator

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.readers.reader import (
    Example,
    OrderedReader,
    Part,
    ReadOptions,
    Skipped,
)
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import SOURCE, Feature
from tftpu.input_pipelines.reading import image_files, image_index
from tftpu.input_pipelines.reading.image_files import ImageFiles

PART_EXAMPLES = 512  # images of a part
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


class ImageReader(OrderedReader):
    """Image files as examples {"image", "label"}.

    Args:
        found: the files.
        options: validation_fraction, held_out, skip_bad.
    """

    def __init__(self, found: ImageFiles, options: ReadOptions):
        if options.validation_fraction:
            found = image_files.share(found, options.validation_fraction, options.held_out)
        self._folder, self._skip_bad = found.folder, options.skip_bad
        features = {
            "image": Feature("string", (), "image"),
            "label": Feature("int32", (), num_classes=found.num_classes),
        }
        rows = [[image.path, image.label, image.bytes] for image in found.images]
        parts = [rows[i : i + PART_EXAMPLES] for i in range(0, len(rows), PART_EXAMPLES)]
        super().__init__(
            features, parts, {"classes": found.class_names} if found.class_names else {}
        )

    def examples(self, part: Part) -> Iterator[Example | Skipped]:
        for path, label, _ in part:
            with tfrecord.opened(path) as file:
                data = file.read()
            name = path.removeprefix(f"{self._folder}/")
            why = _damage(data)
            if not why:
                yield {"image": data, "label": label, SOURCE: name}
            elif self._skip_bad:
                yield Skipped(name, why)
            else:
                raise UserError(
                    f"{path} {why}. Repair or remove it, or leave out files that cannot be decoded "
                    "with --skip_bad."
                )


def _damage(data: bytes) -> str:
    """Returns what keeps an image from being decoded, by the decoder of training; "" if nothing."""
    import tensorflow as tf

    if not data.startswith(_MAGIC):
        return "is neither a JPEG nor a PNG"
    try:
        tf.io.decode_image(data, expand_animations=False)
    except tf.errors.InvalidArgumentError as error:
        said = error.message.partition("}} ")[2] or error.message
        return f"cannot be decoded ({said.removesuffix(' [Op:DecodeImage]')})"
    return ""


def of_folders(folder: str, options: ReadOptions) -> ImageReader:
    """Returns a reader of a folder with one subfolder of images for each class.

    Raises:
        UserError: its subfolders are splits.
    """
    splits = image_files.splits_in(folder)
    if splits:
        raise UserError(
            f"The folders of {folder} are the splits {', '.join(splits)}, not classes: "
            f"give each its own source, as images:{folder}/{next(iter(splits))}."
        )
    return ImageReader(image_files.in_folders(folder, options.classes), options)


def of_index(path: str, options: ReadOptions) -> ImageReader:
    """Returns a reader of the images that a table names."""
    return ImageReader(image_index.in_index(path, options.classes, options.num_classes), options)
