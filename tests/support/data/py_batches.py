"""A `keras.utils.PyDataset` of examples that tests share, and callbacks that change it."""

import keras
import numpy as np
import tensorflow as tf

from tests.support.models.training import examples


class Batches(keras.utils.PyDataset):
    """`examples` in batches, the last of which may be smaller.

    Attributes:
        scale: factor of the features.
        events: names of the calls of the data set, with a prefix; shared with callbacks.
    """

    def __init__(self, count: int, size: int, events=None, prefix: str = "", **options):
        super().__init__(**options)
        self.x, self.y = examples(count)
        self.size = size
        self.scale = 1.0
        self.events = [] if events is None else events
        self.prefix = prefix

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        part = slice(index * self.size, (index + 1) * self.size)
        return self.scale * self.x[part], self.y[part]

    def on_epoch_begin(self):
        self.events.append(f"{self.prefix}begins")

    def on_epoch_end(self):
        self.events.append(f"{self.prefix}ends")

    def generated(self) -> tf.data.Dataset:
        """Returns the same batches from a generator."""
        x, y = self[0]
        specs = tf.TensorSpec((None, *x.shape[1:]), x.dtype), tf.TensorSpec((None,), y.dtype)
        return tf.data.Dataset.from_generator(
            lambda: (self[index] for index in range(len(self))), output_signature=specs
        )


class Scaling(keras.callbacks.Callback):
    """Changes the features of batches at the end of each epoch."""

    def __init__(self, batches: Batches):
        super().__init__()
        self.batches = batches

    def on_epoch_begin(self, epoch, logs=None):
        self.batches.events.append(f"epoch {epoch} begins")

    def on_epoch_end(self, epoch, logs=None):
        self.batches.events.append(f"epoch {epoch} ends")
        self.batches.scale *= -1.5


class UnevenBatches(keras.utils.PyDataset):
    """Examples in batches of given sizes."""

    def __init__(self, sizes: list[int]):
        super().__init__()
        self.x, self.y = examples(sum(sizes))
        self.ends = np.cumsum(sizes)

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        part = slice(0 if index == 0 else self.ends[index - 1], self.ends[index])
        return self.x[part], self.y[part]
