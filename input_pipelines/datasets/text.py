"""Documents as bytes, cut into windows for a language model, in memory."""

from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import small
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.input_pipelines.tensors import Spec, Tensor

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import Text


def build_training(data: "Text", context: DataContext) -> ArrayPipeline:
    """Returns shuffled windows of the training documents; see `reading.order` for the order."""
    return ArrayPipeline(
        examples=_cut_windows(data, data.train_split),
        global_batch_size=context.global_batch_size,
        seed=context.seed,
        prepare=lambda examples, seeds: _shift_windows(*examples),
        from_files=True,
    )


def build_evaluation(data: "Text", context: DataContext) -> tf.data.Dataset:
    """Returns windows that predict every byte, except the first of each document, exactly once."""
    windows = tf.data.Dataset.from_tensor_slices(_cut_windows(data, data.eval_split))
    return windows.batch(context.global_batch_size).map(_shift_windows, tf.data.AUTOTUNE)


def batch_spec(data: "Text", examples: int) -> Spec:
    """Returns the spec of a batch: (bytes, next bytes, weights)."""
    shape = (examples, data.context)
    return (
        tf.TensorSpec(shape, tf.int32),
        tf.TensorSpec(shape, tf.int32),
        tf.TensorSpec(shape, tf.float32),
    )


def _cut_windows(data: "Text", split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns all windows of a split, (windows, context + 1), uint8, and their lengths.

    Windows of one document overlap by one byte, so that each byte except the first is predicted
    exactly once; the last window of a document is padded.

    Raises:
        UserError: no document has two bytes, so that there is nothing to predict.
    """
    windows, lengths = [], []
    for document in small.load_split(data.name, data.data_dir, split)["text"]:
        text = np.frombuffer(document, np.uint8)
        for start in range(0, len(text) - 1, data.context):
            window = text[start : start + data.context + 1]
            lengths.append(len(window))
            windows.append(np.pad(window, (0, data.context + 1 - len(window))))
    if not windows:
        raise UserError(
            f"The split {split!r} of {data.name!r} has no document of two bytes or more, so there "
            "is no byte to predict: choose another split."
        )
    return np.stack(windows), np.array(lengths, np.int32)


def _shift_windows(windows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns bytes, the next bytes, and weights (0.0 for padding), each (batch, context).

    Args:
        windows: (batch, context + 1), uint8.
        lengths: (batch,), int32, the number of bytes of each window that are not padding.
    """
    tokens: Tensor = tf.cast(windows, tf.int32)
    weights = tf.cast(tf.range(1, windows.shape[1]) < lengths[:, None], tf.float32)
    return tokens[:, :-1], tokens[:, 1:], weights
