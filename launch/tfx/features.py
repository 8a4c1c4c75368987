"""Turns a pipeline's examples into the features that the model takes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tftpu.errors import UserError, did_you_mean
from tftpu.launch.tfx.transform import FeatureSpec, Transform, read_schema

if TYPE_CHECKING:
    from tftpu.launch.tfx.examples import Examples


class Features:
    """Converts serialized examples to the batches of a model.

    Args:
        data: the examples, with a transform graph or a schema.

    Attributes:
        names: the names of the features that the model takes.
        transform: the transform graph; None: there is none.
        stored: the features to read from the files.
        source: the name of the schema or transform graph that describes the features, for errors.

    Raises:
        UserError: nothing describes the features, or one is missing, is text or has no fixed shape.
    """

    def __init__(self, data: "Examples"):
        self._label = data.label
        self.transform = Transform(data.transform_graph) if data.transform_graph else None
        if self.transform is None and not data.schema:
            raise UserError(
                "The pipeline gives neither a transform graph nor a schema to describe the "
                'examples: give Trainer(schema=schema_gen.outputs["schema"]), or '
                'transform_graph=transform.outputs["transform_graph"].'
            )
        if self.transform is None:
            self._described = read_schema(data.schema)
            self.source = f"the schema {data.schema!r}"
        else:
            self._described = self.transform.transformed
            self.source = "the transform graph"
        for field, name in [("label", data.label), *(("features", n) for n in data.features)]:
            if name not in self._described:
                raise UserError(
                    f"data.{field} names {name!r}, but {self.source} describes only "
                    f"{_format_names(self._described)}.{did_you_mean(name, self._described)}"
                )
        self.names = data.features or tuple(sorted({*self._described} - {data.label}))
        taken = {name: self._described[name] for name in (*self.names, data.label)}
        _check(taken, data.label)
        self._applied = None if data.transformed else self.transform
        self.stored: FeatureSpec = self._applied.find_needed(taken) if self._applied else taken

    def batch(self, serialized: Any) -> tuple[dict[str, Any], Any]:
        """Returns features by name, and labels, from serialized examples, (batch,) strings."""
        if self._applied:
            found = self._applied(serialized, self.stored)
        else:
            found = tf.io.parse_example(serialized, self.stored)
        label = self._set_shape(found, self._label)
        if label.dtype.is_integer and label.shape[1:] == [1]:
            label = tf.squeeze(label, 1)
        return self._select_features(found), label

    def select_served(self) -> FeatureSpec:
        """Returns the raw features that a prediction needs; the label is not one of them."""
        if self.transform is None:
            return {name: self._described[name] for name in self.names}
        return self.transform.find_needed(self.names)

    def from_raw(self, serialized: Any, raw: FeatureSpec) -> dict[str, Any]:
        """Returns features by name, from raw examples without labels.

        Args:
            serialized: (batch,) strings.
            raw: the features that `select_served` returns.
        """
        if self.transform is None:
            return self._select_features(tf.io.parse_example(serialized, raw))
        return self._select_features(self.transform(serialized, raw))

    def _select_features(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._set_shape(found, name) for name in self.names}

    def _set_shape(self, found: Mapping[str, Any], name: str) -> Any:
        """Returns a feature with its static shape, which the transform graph may have lost."""
        return tf.ensure_shape(found[name], (None, *self._described[name].shape))


def _check(taken: FeatureSpec, label: str) -> None:
    """Raises `UserError` for a feature without a fixed shape, and for text."""
    for name, feature in taken.items():
        what = "label" if name == label else "feature"
        rest = "" if name == label else ", or choose others: Examples(features=(…))"
        if not isinstance(feature, tf.io.FixedLenFeature):
            raise UserError(
                f"The {what} {name!r} has no fixed shape, but a compiled model needs one. Set it "
                "in the schema, as SchemaGen(infer_feature_shape=True) does, or in "
                f"preprocessing_fn, for example with tf.sparse.to_dense and tf.ensure_shape{rest}."
            )
        if feature.dtype == tf.string:
            raise UserError(
                f"The {what} {name!r} is text, which no accelerator can process. Turn it into "
                "numbers in preprocessing_fn, for example with "
                f"tft.compute_and_apply_vocabulary{rest}."
            )


def _format_names(names: FeatureSpec) -> str:
    return ", ".join(sorted(names)) or "no features"
