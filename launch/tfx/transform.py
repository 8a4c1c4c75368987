"""The schema and the transform graph of a pipeline."""

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from tftpu.errors import UserError

# Features of `tf.io.parse_example`, by name.
FeatureSpec = dict[str, Any]
SERIALIZED = tf.TensorSpec((None,), tf.string, name="examples")
# Of a graph or a schema that is missing, damaged, or describes what no example can hold.
_UNREADABLE = (OSError, ValueError, TypeError, tf.errors.OpError)


class Transform:
    """The transform graph that TFX's Transform component wrote.

    Args:
        folder: of the graph.

    Attributes:
        raw: the features that it takes.
        transformed: the features that it returns.
        layer: applies it to a dictionary of raw features; those that are left out may be missing,
            and so are then the features that are made of them.

    Raises:
        UserError: there is no transform graph in the folder.
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
        """Returns the raw features without which these transformed ones cannot be made."""
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
            raw: the features to take from them.
        """
        return self.layer(tf.io.parse_example(serialized, raw))

    def _list_outputs(self, raw: FeatureSpec) -> set[str]:
        """Returns the names of the features that are made of these alone."""
        traced: Any = tf.function(lambda serialized: self(serialized, raw), autograph=False)
        return set(traced.get_concrete_function(SERIALIZED).structured_outputs)


def read_schema(path: str) -> FeatureSpec:
    """Returns the features that a schema describes.

    Args:
        path: of the file that SchemaGen or ImportSchemaGen wrote.

    Raises:
        UserError: the file is not a schema.
    """
    _import_tensorflow_transform()
    import tensorflow_metadata.proto.v0.schema_pb2 as generated
    from google.protobuf import text_format
    from tensorflow_transform.tf_metadata import schema_utils

    schema_pb2: Any = generated  # whose classes exist at run time only
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
            f"Examples of TFX need tensorflow-transform, which comes with it ({error}): install "
            "tfx in this environment."
        ) from error
    return tft
