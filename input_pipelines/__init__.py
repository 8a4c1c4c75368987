"""Input pipelines: from a data set's name to static batches of device dtypes.

`training(data, seed)` has `starting_at(step)`, an endless dataset of global batches; `evaluation`
is every example of the evaluation split once; `batch_spec` tells the shapes without reading any
data. Imports no TensorFlow until one of them is called.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tftpu.config import Data
from tftpu.errors import UserError
from tftpu.input_pipelines import sources

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.input_pipelines.epochs import Training

_READERS = {sources.Images: "images", sources.Text: "text"}


def training(data: Data, seed: int = 0) -> "Training":
    """The training split, shuffled anew each epoch by `seed`."""
    return _reader(data).training(data, seed)


def evaluation(data: Data) -> "tf.data.Dataset":
    """The whole evaluation split, once, in batches of `global_batch`; the last may be smaller."""
    return _reader(data).evaluation(data)


def batch_spec(data: Data, examples: int) -> Any:
    """The shapes and dtypes of a batch of so many examples, as nested `tf.TensorSpec`s."""
    return _reader(data).batch_spec(data, examples)


def _reader(data: Data):
    for kind, module in _READERS.items():
        if isinstance(data, kind):
            return importlib.import_module(f"tftpu.input_pipelines.{module}")
    raise UserError(f"{type(data).__name__} is no kind of data that tftpu reads.")
