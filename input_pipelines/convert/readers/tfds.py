"""Data sets that TFDS prepared."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.readers.reader import (
    Example,
    OrderedReader,
    Part,
    ReadOptions,
    select_features,
)
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import DTYPES, Feature

_WIDER = {"bool": "uint8", "int8": "int32", "int16": "int32", "uint32": "int64"}


class TfdsReader(OrderedReader):
    """A split of a TFDS data set.

    Args:
        name: the name of the data set.
        options: `split`, `data_dir` and `features` are used.
    """

    def __init__(self, name: str, options: ReadOptions):
        from tftpu.input_pipelines.datasets import tfds

        builder = tfds.open_builder(name, options.data_dir)
        tfds.count_examples(builder, options.source_split)
        tfds.check_format(builder)
        self._name, self._data_dir = name, options.data_dir
        about, features = {}, {}
        for feature, kind in select_features(dict(builder.info.features), options.features).items():
            features[feature] = _describe_feature(feature, kind)
            if feature == "label" and getattr(kind, "names", None):
                about["classes"] = list(kind.names)
        parts = [
            [str(file.filename), file.skip, file.take]
            for file in builder.info.splits[options.source_split].file_instructions
        ]
        super().__init__(features, parts, about)

    def read_examples(self, part: Part) -> Iterator[Example]:
        import tensorflow as tf
        import tensorflow_datasets as tfds

        from tftpu.input_pipelines.datasets.tfds import open_builder

        features = open_builder(self._name, self._data_dir).info.features
        encoded = {
            name: tfds.decode.SkipDecoding()
            for name in self.features
            if isinstance(features[name], tfds.features.Image)
        }

        @tf.function(input_signature=[tf.TensorSpec((), tf.string)])
        def parse_record(record: Any) -> Any:
            return features.deserialize_example(record, decoders=encoded)

        path, skip, take = part
        end = skip + take if take >= 0 else None
        for _, record in itertools.islice(tfrecord.read_records(path), skip, end):
            example = parse_record(tf.constant(record))
            yield {name: example[name].numpy() for name in self.features}


def _describe_feature(name: str, kind: Any) -> Feature:
    """Returns the record feature that stores a feature of TFDS.

    Raises:
        UserError: records cannot hold the feature.
    """
    import tensorflow_datasets as tfds

    if isinstance(kind, tfds.features.Image):
        return Feature("string", (), "image")
    if isinstance(kind, tfds.features.ClassLabel):
        return Feature("int64", (), num_classes=kind.num_classes or 0)
    if isinstance(kind, tfds.features.Text):
        return Feature("string")
    if isinstance(kind, tfds.features.Tensor):
        shape: Any = kind.shape
        numpy_dtype: Any = kind.np_dtype
        dtype = np.dtype(numpy_dtype).name
        dtype = _WIDER.get(dtype, dtype)
        if dtype in DTYPES and None not in shape:
            return Feature(dtype, tuple(shape), "raw" if shape else "list")
    raise UserError(
        f"The feature {name!r} ({kind}) has no static shape and dtype that records support: list "
        "the features that you want in `features`."
    )
