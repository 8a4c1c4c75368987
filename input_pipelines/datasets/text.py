"""Documents as bytes, cut into windows for a language model."""

from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.input_pipelines.datasets import tfds
from tftpu.input_pipelines.reading.epochs import Training
from tftpu.input_pipelines.sources import Text


def training(data: Text, seed: int) -> Training:
    """Shuffled windows of the training documents; see `epochs.Training` for the order."""
    return Training(
        examples=_windows(data, data.train_split),
        global_batch_size=data.global_batch_size,
        seed=seed,
        prepare=lambda examples, seeds: _shifted(*examples),
    )


def evaluation(data: Text) -> tf.data.Dataset:
    """Every byte of the evaluation documents but their first is predicted once."""
    windows = tf.data.Dataset.from_tensor_slices(_windows(data, data.eval_split))
    return windows.batch(data.global_batch_size).map(_shifted, tf.data.AUTOTUNE)


def batch_spec(data: Text, examples: int) -> Any:
    """(bytes, next bytes, weights) of a batch."""
    shape = (examples, data.context)
    return (
        tf.TensorSpec(shape, tf.int32),
        tf.TensorSpec(shape, tf.int32),
        tf.TensorSpec(shape, tf.float32),
    )


def _windows(data: Text, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All windows of a split: bytes (windows, context + 1), uint8, and how many are real.

    Windows of one document overlap by one byte, so that each byte but the first is predicted
    exactly once; the last window of a document is padded.
    """
    builder = tfds.prepared(data.name, data.data_dir)
    tfds.count(builder, split)
    windows, lengths = [], []
    documents = builder.as_dataset(split=split, shuffle_files=False)
    for document in documents.as_numpy_iterator():
        text = np.frombuffer(document["text"], np.uint8)
        for start in range(0, len(text) - 1, data.context):
            window = text[start : start + data.context + 1]
            lengths.append(len(window))
            windows.append(np.pad(window, (0, data.context + 1 - len(window))))
    return np.stack(windows), np.array(lengths, np.int32)


def _shifted(windows: tf.Tensor, lengths: tf.Tensor) -> tuple:
    """Bytes, the bytes that follow them, and 1.0 where that is not padding.

    Args:
        windows: (batch, context + 1), uint8.
        lengths: (batch,), the bytes of each window that are real.
    """
    tokens = tf.cast(windows, tf.int32)
    weights = tf.cast(tf.range(1, windows.shape[1]) < lengths[:, None], tf.float32)
    return tokens[:, :-1], tokens[:, 1:], weights
