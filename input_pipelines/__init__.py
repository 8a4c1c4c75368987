"""Input pipelines: from a description of the data to static batches of device dtypes.

    data = StreamedImages(format="folder", data_dir="photos", num_classes=5, global_batch_size=256)
    training(data, seed=0).starting_at(step=0)     # what Trainer.fit takes, too
    from_arrays(x, y, global_batch_size=256)            # what Python has at hand

`training(data, seed)` has `starting_at(step, host, hosts)`, an endless dataset of global batches
or a host's part of each, `global_batch_size` and `count`, the examples of an epoch. Which examples a
step sees depends on the data, the seed, the global batch and the step alone; `order` says how, and
`pipeline` which stages keep it so. `evaluation` is every example of the evaluation split once;
`batch_spec` tells the shapes without reading an example. `sources` has what `data` can be.

Imports no TensorFlow until one of them is called.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tftpu.config import Data
from tftpu.errors import UserError
from tftpu.input_pipelines import sources

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.input_pipelines.pipeline import Pipeline
    from tftpu.input_pipelines.reading.epochs import Training

_READERS = {
    sources.Images: "images",
    sources.Text: "text",
    sources.StreamedImages: "streamed_images",
    sources.Tokens: "packed_tokens",
    sources.Records: "record_shards",
    sources.Synthetic: "arrays",
    sources.BigQuery: "bigquery",
}


def training(data: Data, seed: int = 0) -> "Training | Pipeline":
    """The training split, shuffled anew each epoch by `seed`."""
    return _reader(data).training(data, seed)


def evaluation(data: Data) -> "tf.data.Dataset":
    """The whole evaluation split, once, in batches of `global_batch_size`; the last may be smaller."""
    return _reader(data).evaluation(data)


def batch_spec(data: Data, examples: int) -> Any:
    """The shapes and dtypes of a batch of so many examples, as nested `tf.TensorSpec`s."""
    return _reader(data).batch_spec(data, examples)


def class_names(data: Data) -> list[str] | None:
    """The names of a data set's classes by their numbers; None where it has none."""
    return _reader(data).class_names(data)


def from_arrays(
    features: Any, labels: Any = None, weights: Any = None, *, global_batch_size: int, seed: int = 0
) -> "Training":
    """A pipeline over arrays in memory; see `arrays.from_arrays`."""
    from tftpu.input_pipelines.datasets import arrays

    return arrays.from_arrays(
        features, labels, weights, global_batch_size=global_batch_size, seed=seed
    )


def from_generator(
    make: Callable[[], Iterable[Any]], spec: Any, *, global_batch_size: int
) -> "tf.data.Dataset":
    """Batches of what a Python generator yields, slowly; see `arrays.from_generator`."""
    from tftpu.input_pipelines.datasets import arrays

    return arrays.from_generator(make, spec, global_batch_size=global_batch_size)


def _reader(data: Data):
    for kind, module in _READERS.items():
        if isinstance(data, kind):
            return importlib.import_module(f"tftpu.input_pipelines.datasets.{module}")
    raise UserError(f"{type(data).__name__} is no kind of data that tftpu reads.")
