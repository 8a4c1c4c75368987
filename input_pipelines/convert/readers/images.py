"""Readers of image files, in one folder for each class or listed in a table."""

from collections.abc import Iterator

from tftpu.errors import UserError
from tftpu.input_pipelines.augment import decode
from tftpu.input_pipelines.convert.readers.reader import (
    Example,
    OrderedReader,
    Part,
    ReadOptions,
    SkippedFile,
)
from tftpu.input_pipelines.formats import pillow, tfrecord
from tftpu.input_pipelines.formats.manifest import SOURCE, Feature
from tftpu.input_pipelines.reading import image_files, image_index
from tftpu.input_pipelines.reading.image_files import ImageFiles
from tftpu.input_pipelines.reading.listing import decode_path

PART_EXAMPLES = 512  # images in a part


class ImageReader(OrderedReader):
    """Reader of image files, as examples {"image", "label", `manifest.SOURCE`: the file's name}.

    Args:
        found: the image files and their classes.
        options: `validation_fraction`, `held_out` and `skip_bad` are used.
    """

    def __init__(self, found: ImageFiles, options: ReadOptions):
        if options.validation_fraction:
            found = image_files.select_share(found, options.validation_fraction, options.held_out)
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
        self.notes += image_files.describe(found)
        if not options.held_out:  # reported once, by the reader of the other images
            self.notes += image_files.describe_left_out(found.left_out)

    def read_examples(self, part: Part) -> Iterator[Example | SkippedFile]:
        for path, label, _ in part:
            with tfrecord.open_file(path) as file:
                data = file.read()
            name = decode_path(path.removeprefix(f"{self._folder}/"))
            try:
                image = _encode_image(data)
            except ValueError as error:
                if not self._skip_bad:
                    raise UserError(
                        f"{decode_path(path)} {error}. Repair or remove it, or add --skip_bad to "
                        "leave out files that cannot be decoded."
                    ) from error
                yield SkippedFile(name, str(error))
            else:
                yield {"image": image, "label": label, SOURCE: name}


def _encode_image(data: bytes) -> bytes:
    """Returns the image of a record: JPEGs and PNGs unchanged, other formats as PNG.

    Raises:
        ValueError: the decoder that training uses cannot decode it; the message says why.
    """
    if not data.startswith((pillow.JPEG, pillow.PNG)):
        return pillow.to_png(data)
    if why := decode.explain_failure(data):
        raise ValueError(why)
    return data


def from_folders(folder: str, options: ReadOptions) -> ImageReader:
    """Returns a reader of a folder with one subfolder of images for each class."""
    return ImageReader(image_files.list_in_folders(folder, options.classes), options)


def from_index(path: str, options: ReadOptions) -> ImageReader:
    """Returns a reader of the images that a table lists."""
    return ImageReader(
        image_index.list_in_index(path, options.classes, options.num_classes), options
    )
