"""Random examples in memory."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import tensorflow as tf

from tftpu.amounts import format_size
from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import batches
from tftpu.input_pipelines.formats.manifest import parse_features
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.input_pipelines.tensors import Spec

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import Synthetic


def build_training(data: "Synthetic", context: DataContext) -> ArrayPipeline:
    """Returns random examples, shuffled."""
    return ArrayPipeline(
        _draw_values(data),
        context.global_batch_size,
        context.seed,
        lambda examples, seeds: examples,
    )


def build_evaluation(data: "Synthetic", context: DataContext) -> tf.data.Dataset:
    """Returns the examples of `build_training`, in order."""
    return tf.data.Dataset.from_tensor_slices(_draw_values(data)).batch(context.global_batch_size)


def batch_spec(data: "Synthetic", examples: int) -> Spec:
    """Returns the spec of a batch: (features, labels)."""
    return batches.build_spec(
        parse_features(data.spec), data.features, data.label, examples=examples
    )


def _draw_values(data: "Synthetic") -> Any:
    rng = np.random.default_rng(0)
    values = {}
    features = parse_features(data.spec)
    size = 4 * data.examples * sum(math.prod(feature.shape) for feature in features.values())
    if size > psutil.virtual_memory().available:
        raise UserError(
            f"The {data.examples} examples of data.spec take {format_size(size)}, more than the "
            "free memory: use fewer (data.examples) or smaller ones."
        )
    for name, feature in features.items():
        shape = (data.examples, *feature.shape)
        if feature.dtype == "float32":
            values[name] = rng.standard_normal(shape, np.float32)
        else:
            dtype = np.int32 if feature.dtype in ("int64", "uint16") else feature.dtype
            values[name] = rng.integers(0, feature.num_classes, shape).astype(dtype)
    return batches.arrange_batch(values, data.features, data.label)
