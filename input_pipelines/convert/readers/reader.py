"""The interface of readers, and their options."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.formats.manifest import Feature

Example = dict[str, Any]  # values by feature name, as `example_proto.encode` takes them
Part = Any  # a JSON value that identifies a part
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options of a reader. Options that do not apply to the reader must keep their defaults.

    Args:
        split: the split of the source (tfds, tfrecord), which is also its name in the output;
            NAME=SPLIT if the names differ, such as validation=train[90%:].
        data_dir: the folder in which TFDS keeps its data sets.
        features: names of the features to read; (): all.
        tokenizer, end_of_text, context: for text; see `packing`.
        field: the field or column of a table that holds the text.
        snapshot: for BigQuery: the point in time to read, such as 2026-11-20T12:00:00Z.
        classes: for images: the names of all classes in the order of their ids; (): the names in
            the source.
        num_classes: the number of class ids; 0: in an index, one more than the highest id. Records
            of images without a manifest need it, or `classes`.
        image_feature, label_feature: for records of images without a manifest: the features' names.
        first_class: the lowest class id in records of images, which becomes 0.
        validation_fraction: for images: the share of each class that is held out for validation.
        held_out: for images: whether to read the held-out images; otherwise the others are read.
        skip_bad: for images: whether to leave out files that cannot be decoded.
    """

    split: str = "train"
    data_dir: str | None = None
    features: tuple[str, ...] = ()
    tokenizer: str | None = None
    end_of_text: str | None = None
    context: int = 1024
    field: str = "text"
    snapshot: str | None = None
    classes: tuple[str, ...] = ()
    num_classes: int = 0
    image_feature: str = "image"
    label_feature: str = "label"
    first_class: int = 0
    validation_fraction: float = 0.0
    held_out: bool = False
    skip_bad: bool = False

    @property
    def source_split(self) -> str:
        """The split of the source to read."""
        return self.split.partition("=")[2] or self.split

    @property
    def output_split(self) -> str:
        """The name of the split in the output."""
        return self.split.partition("=")[0].partition("[")[0]


@dataclasses.dataclass(frozen=True)
class SkippedFile:
    """A file that a reader left out.

    Attributes:
        file: the name of the file in the source.
        why: the reason, as the end of a sentence.
    """

    file: str
    why: str


class Reader(Protocol):
    """A source of examples, divided into parts that any process can read on its own.

    A part always yields the same examples in the same order; the conversion shuffles them later. A
    reader is sent to other processes, so it must not hold open files.
    """

    features: dict[str, Feature]
    about: dict[str, Any]  # facts about the source, for the manifest
    notes: list[str]  # messages to the user: what was found and what is left out
    parts: list[Part]

    @property
    def state(self) -> Part:
        """A JSON value that changes with the source; for most readers, the parts with sizes."""
        ...

    @property
    def ordered(self) -> bool:
        """True if the parts and the order of their examples are the same at each reading."""
        ...

    def read_examples(self, part: Part) -> "Iterator[Example | SkippedFile]":
        """Yields the examples of a part in order, with skipped files in their places.

        An example that was made from a file may hold the file's name as `manifest.SOURCE`, beside
        the features.

        Raises:
            UserError: an example cannot be read; the message names the file and the record.
        """
        ...


class OrderedReader:
    """The base class of readers whose parts and examples are the same at each reading.

    Args:
        features: the features of an example.
        parts: the parts of the source.
        about: facts about the source, for the manifest.
    """

    ordered = True

    def __init__(self, features: dict[str, Feature], parts: list[Part], about: dict[str, Any]):
        self.features = features
        self.parts = parts
        self.about = about
        self.notes: list[str] = []

    @property
    def state(self) -> list[Part]:
        return self.parts


def select_features(features: Mapping[str, Value], names: Sequence[str]) -> dict[str, Value]:
    """Returns the features with the given names, or all features if no name is given.

    Raises:
        UserError: there is no such feature.
    """
    for name in names:
        if name not in features:
            raise UserError(f"There is no feature {name!r}.{did_you_mean(name, features)}")
    return {name: features[name] for name in names or features}
