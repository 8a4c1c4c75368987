"""Parses records of any program that hold an image and its class, under any feature names."""

import dataclasses
from typing import Any

import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import example_proto, manifest
from tftpu.input_pipelines.formats.manifest import Feature, Manifest
from tftpu.input_pipelines.tensors import Batch, Tensor


@dataclasses.dataclass(frozen=True)
class ImageRecords:
    """A parser of records with an image and its class, whose features may have any names.

    Args:
        image, label: the names of the features. A label is a class id or, with `classes`, a text.
        num_classes: number of classes.
        first_class: the lowest class id, which becomes 0.
        classes: names of the classes, in the order of their ids.
    """

    image: str
    label: str
    num_classes: int
    first_class: int = 0
    classes: tuple[str, ...] = ()

    def build_parser(self, found: Manifest) -> Any:
        """Returns the function that turns records (batch,) into {"image", "label"}.

        The function raises `tf.errors.InvalidArgumentError` for a label that is not one of the
        classes.

        Raises:
            UserError: the records have no such features, or the label cannot be a class.
        """
        label = found.features.get(self.label)
        if not _is_image(found, self.image) or label is None:
            raise UserError(
                f"{_describe_data(found)}: records of images need a feature 'image' with the "
                "encoding 'image', and a feature 'label' with a class id. If they have other "
                "names, set image_feature and label_feature."
            )
        if label.shape or label.dtype == "float32":
            raise UserError(
                f"{_describe_data(found)}: the feature {self.label!r} must hold one class id or "
                "one text for each image. Set label_feature to a feature that does."
            )
        if label.dtype == "string" and not self.classes:
            raise UserError(
                f"{_describe_data(found)}: the label {self.label!r} is a text. List the texts in "
                "`classes`, in the order of their class ids, or set label_feature to the class id."
            )
        image = Feature("string", (), "image")
        stored = Feature("string" if label.dtype == "string" else "int64")
        parse = example_proto.build_parser({self.image: image, self.label: stored})
        number = self._find_label if label.dtype == "string" else self._parse_class_id

        def parse_records(records: Tensor) -> Batch:
            values = parse(records, tf.fill(tf.shape(records), ""))
            return {"image": values[self.image], "label": number(values[self.label])}

        return parse_records

    def _parse_class_id(self, labels: Tensor) -> Tensor:
        first, end = self.first_class, self.first_class + self.num_classes
        what = (
            f"the class id {self.label!r} is not in [{first}, {end}): correct it, or num_classes, "
            "or first_class, the lowest class id"
        )
        example_proto.check((labels >= first) & (labels < end), what, tf.strings.as_string(labels))
        return tf.cast(labels - first, tf.int32)

    def _find_label(self, labels: Tensor) -> Tensor:
        equal = labels[:, None] == tf.constant(self.classes)[None]  # (batch, classes)
        what = f"the label {self.label!r} is none of the {len(self.classes)} classes"
        example_proto.check(tf.reduce_any(equal, axis=1), what, labels)
        return tf.cast(tf.argmax(equal, axis=1), tf.int32)


def build_image_parser(found: Manifest, name: str) -> Any:
    """Returns the function that turns records (batch,) into {"image"}, without their classes.

    Args:
        found: the manifest of the records.
        name: the name of the image's feature. Records with a single image may have another name for
            it.

    Raises:
        UserError: the records have no such image.
    """
    images = [other for other, f in found.features.items() if f.encoding == "image"]
    if not _is_image(found, name) and len(images) != 1:
        raise UserError(
            f"{_describe_data(found)}: records of images need the feature {name!r} with the "
            "encoding 'image'."
        )
    chosen = name if _is_image(found, name) else images[0]
    parse = example_proto.build_parser({chosen: Feature("string", (), "image")})
    return lambda records: {"image": parse(records, tf.fill(tf.shape(records), ""))[chosen]}


def _is_image(found: Manifest, name: str) -> bool:
    """Returns whether a feature can be an image: other programs declare images only as bytes."""
    feature = found.features.get(name)
    return feature is not None and (feature.dtype, feature.shape) == ("string", ())


def _describe_data(found: Manifest) -> str:
    features = manifest.describe_features(found.features)
    return f"The data set in {found.folder} has {features or 'no features'}"
