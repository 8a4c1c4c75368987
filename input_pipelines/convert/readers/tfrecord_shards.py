"""Readers of TFRecord files: data sets of tftpu to convert again, and other programs' images."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.readers.reader import (
    Example,
    OrderedReader,
    Part,
    ReadOptions,
    select_features,
)
from tftpu.input_pipelines.formats import manifest, tfrecord
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.reading import counted
from tftpu.storage import files

_BATCH = 256  # records parsed at a time
# Options that set the meaning of a class id, the same in every split.
_FIXED = ("label_feature", "first_class")
_NOT_COPIED = (*manifest.OF_SPLITS, *_FIXED)


def choose_reader(folder: str, options: ReadOptions) -> "ShardReader | ImageRecordReader":
    """Returns the reader of a split: of a data set with a manifest, or of another program's images.

    Raises:
        UserError: an option does not apply to this kind of folder.
    """
    described = files.exists(files.join(folder, manifest.NAME))
    names = ("features",) if not described else ("image_feature", "label_feature", "first_class")
    for name in names:
        if getattr(options, name) != getattr(ReadOptions, name):
            raise UserError(
                f"{name} works only with records {'with' if name == 'features' else 'without'} a "
                f"manifest, unlike those in {folder}: leave it out."
            )
    return (ShardReader if described else ImageRecordReader)(folder, options)


class ShardReader(OrderedReader):
    """Reader of a split of a data set of shards with a manifest.

    Args:
        folder: the folder of the data set.
        options: `split` and `features` are used.
    """

    def __init__(self, folder: str, options: ReadOptions):
        found = manifest.read(folder)
        self._all, self._compression = found.features, found.compression
        super().__init__(
            select_features(found.features, options.features),
            [
                [found.build_path(s), s.examples, s.crc32c]
                for s in found.list_shards(options.source_split)
            ],
            {key: value for key, value in found.about.items() if key not in _NOT_COPIED},
        )

    def read_examples(self, part: Part) -> Iterator[Example]:
        import tensorflow as tf

        from tftpu.input_pipelines.formats import example_proto

        parse = example_proto.build_parser(self._all)
        for names, records in _iterate_batches(part[0], self._compression):
            examples = parse(tf.constant(records), tf.constant(names))
            columns = [examples[name].numpy() for name in self.features]
            for values in zip(*columns):
                yield dict(zip(self.features, values))


class ImageRecordReader(OrderedReader):
    """Reader of TFRecord files of images without a manifest, as examples {"image", "label"}.

    Args:
        folder: the folder of the files.
        options: `split`, `image_feature`, `label_feature`, `first_class`, `num_classes` and
            `classes` are used.
    """

    def __init__(self, folder: str, options: ReadOptions):
        from tftpu.input_pipelines.formats.image_records import ImageRecords

        self._found = counted.read_manifest(folder, options.source_split)
        classes = options.classes
        self._records = ImageRecords(
            options.image_feature,
            options.label_feature,
            len(classes) or options.num_classes,
            options.first_class,
            classes,
        )
        self._records.build_parser(self._found)
        if not self._records.num_classes:
            raise UserError(
                f"The labels of {folder} are class ids, but the number of classes is unknown: set "
                "num_classes."
            )
        features = {
            "image": Feature("string", (), "image"),
            "label": Feature("int32", num_classes=self._records.num_classes),
        }
        shards = self._found.list_shards(options.source_split)
        parts = [[self._found.build_path(shard), shard.examples, shard.crc32c] for shard in shards]
        about = {name: getattr(options, name) for name in _FIXED}
        super().__init__(features, parts, about | ({"classes": list(classes)} if classes else {}))

    def read_examples(self, part: Part) -> Iterator[Example]:
        import tensorflow as tf

        from tftpu.input_pipelines.augment import decode

        parse = self._records.build_parser(self._found)
        for names, records in _iterate_batches(part[0], self._found.compression):
            try:
                values = parse(tf.constant(records))
            except tf.errors.InvalidArgumentError:
                for name, record in zip(names, records):
                    try:
                        parse(tf.constant([record]))
                    except tf.errors.InvalidArgumentError as error:
                        raise UserError(f"{name}: {_strip_node_names(error)}.") from error
                raise
            columns = values["image"].numpy(), values["label"].numpy()
            for name, image, label in zip(names, *columns):
                if why := decode.explain_failure(image):
                    raise UserError(
                        f"{name}: the image {why}. Write the file again without this record, or "
                        "train from these files without converting them: data.on_bad_record=skip "
                        "then skips it."
                    )
                yield {"image": image, "label": label}


def _iterate_batches(path: str, compression: str) -> Iterator[tuple[list[str], list[bytes]]]:
    """Yields the names and the content of a file's records, in batches."""
    records = enumerate(tfrecord.read_records(path, compression))
    while batch := list(itertools.islice(records, _BATCH)):
        yield [f"record {n} of {path}" for n, _ in batch], [record for _, (_, record) in batch]


def _strip_node_names(error: Any) -> str:
    """Returns TensorFlow's error message or a failed assertion's texts, without names of nodes."""
    said = error.message.partition("}} ")[2] or error.message
    checked = re.findall(r"""^\s*b(['"])(.*)\1$""", said.partition("Summarized data:")[2], re.M)
    return ": ".join(words for _, words in checked) or " ".join(said.split())
