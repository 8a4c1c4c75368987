"""Input pipelines: from a description of the data to batches of static shape.

    data = StreamedImages(format="folder", data_dir="photos", num_classes=5, global_batch_size=256)
    training(data, seed=0).starting_at(step=0)     # `Trainer.fit` takes `training(...)` itself
    from_arrays(x, y, global_batch_size=256)       # arrays in memory

`training(data, seed)` returns an object with `global_batch_size`; `count`, the examples of an
epoch; and `starting_at(step, host, hosts)`, an endless dataset of global batches or of one host's
part of each. A step's examples depend only on the data, the seed, the global batch size and the
step; `reading.order` explains how, and `pipeline` how the later stages preserve this. `evaluation`
yields every example of the evaluation split once. `batch_spec` returns shapes and dtypes without
reading an example. `sources` has the classes that describe data.

Imports no TensorFlow until one of the functions is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tftpu.config import Data
from tftpu.errors import UserError
from tftpu.input_pipelines.sources import ReadableData

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.input_pipelines.pipeline import Pipeline
    from tftpu.input_pipelines.reading.epochs import Training
    from tftpu.input_pipelines.tensors import Spec


def training(data: Data, seed: int = 0) -> Training | Pipeline:
    """Returns the training split, reshuffled each epoch by `seed`."""
    return _readable(data).training(seed)


def evaluation(data: Data) -> tf.data.Dataset:
    """Returns the evaluation split, once, in batches of `global_batch_size`.

    The last batch may be smaller.
    """
    return _readable(data).evaluation()


def batch_spec(data: Data, examples: int) -> Spec:
    """Returns the shapes and dtypes of a batch of `examples`, as nested `tf.TensorSpec`s."""
    return _readable(data).batch_spec(examples)


def class_names(data: Data) -> list[str] | None:
    """Returns the names of a data set's classes by class id, or None if it has none."""
    return _readable(data).class_names()


def from_arrays(
    features: Any, labels: Any = None, weights: Any = None, *, global_batch_size: int, seed: int = 0
) -> Training:
    """Returns a pipeline over arrays in memory; see `arrays.from_arrays`."""
    from tftpu.input_pipelines.datasets import arrays

    return arrays.from_arrays(
        features, labels, weights, global_batch_size=global_batch_size, seed=seed
    )


def from_generator(
    make: Callable[[], Iterable[Any]], spec: Spec, *, global_batch_size: int
) -> tf.data.Dataset:
    """Returns batches of the examples of a Python generator; see `arrays.from_generator`."""
    from tftpu.input_pipelines.datasets import arrays

    return arrays.from_generator(make, spec, global_batch_size=global_batch_size)


def _readable(data: Data) -> ReadableData:
    if isinstance(data, ReadableData):
        return data
    raise UserError(
        f"{type(data).__name__} does not describe data that tftpu can read: use a class of "
        "tftpu.input_pipelines.sources, or derive yours from its ReadableData."
    )
