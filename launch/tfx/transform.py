"""The schema and the transform graph of a pipeline."""

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from tftpu.errors import UserError

# The features of `tf.io.parse_example`, by name.
FeatureSpec = dict[str, Any]
SERIALIZED = tf.TensorSpec((None,), tf.string, name="examples")
# Errors of a graph or a schema that is missing, damaged, or cannot describe an example.
_UNREADABLE = (OSError, ValueError, TypeError, tf.errors.OpError)


class Transform:
    """The transform graph that TFX's Transform component wrote.

    Args:
        folder: the folder of the graph.

    Attributes:
        raw: the features that the graph takes.
        transformed: the features that the graph returns.
        layer: a layer that applies the graph to a dictionary of raw features. If raw features are
            missing, so are the features that are made from them.

    Raises:
        UserError: `tensorflow_transform` is missing, or the folder has no readable graph.
    """

    def __init__(self, folder: str):
        tft = _import_tensorflow_transform()
        output = tft.TFTransformOutput(folder)
        try:
            self.raw: FeatureSpec = output.raw_feature_spec()
            self.transformed: FeatureSpec = output.transformed_feature_spec()
            self.layer: Any = output.transform_features_layer()
            self._list_outputs(self.raw)
        except _UNREADABLE as error:
            raise UserError(
                f"The transform graph {folder!r} cannot be read ({error}): give "
                'Trainer(transform_graph=transform.outputs["transform_graph"]).'
            ) from error

    def find_needed(self, names: Collection[str]) -> FeatureSpec:
        """Returns the raw features that are needed to make these transformed features."""
        found = {}
        for name, feature in self.raw.items():
            others = {other: spec for other, spec in self.raw.items() if other != name}
            if not others or not self._list_outputs(others) >= {*names}:
                found[name] = feature
        return found

    def __call__(self, serialized: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the transformed features of serialized raw examples.

        Args:
            serialized: (batch,) strings.
            raw: the features to read from them.
        """
        return self.layer(tf.io.parse_example(serialized, raw))

    def _list_outputs(self, raw: FeatureSpec) -> set[str]:
        """Returns the names of the transformed features that can be made from `raw` alone."""
        traced: Any = tf.function(lambda serialized: self(serialized, raw), autograph=False)
        return set(traced.get_concrete_function(SERIALIZED).structured_outputs)


def read_schema(path: str) -> FeatureSpec:
    """Returns the features that a schema describes.

    Args:
        path: the path of the file that SchemaGen or ImportSchemaGen wrote.

    Raises:
        UserError: the file is not a schema.
    """
    _import_tensorflow_transform()
    import tensorflow_metadata.proto.v0.schema_pb2 as generated
    from google.protobuf import text_format
    from tensorflow_transform.tf_metadata import schema_utils

    schema_pb2: Any = generated  # the generated classes exist at run time only
    try:
        with tf.io.gfile.GFile(path) as file:
            schema = text_format.Parse(file.read(), schema_pb2.Schema())
        return schema_utils.schema_as_feature_spec(schema).feature_spec
    except (*_UNREADABLE, text_format.ParseError) as error:
        raise UserError(f"The schema {path!r} cannot be read: {error}.") from error


def _import_tensorflow_transform() -> Any:
    try:
        import tensorflow_transform as tft
    except ImportError as error:
        raise UserError(
            f"Examples of TFX need tensorflow-transform, which is part of TFX ({error}): install "
            "tfx in this environment."
        ) from error
    return tft
