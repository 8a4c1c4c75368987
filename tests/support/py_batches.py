"""A `keras.utils.PyDataset` of examples that tests share."""

import keras

from tests.support.training import examples


class Batches(keras.utils.PyDataset):
    """`examples` in batches, the last of which may be smaller.

    Attributes:
        ended: number of epochs whose end was told.
    """

    def __init__(self, count: int, size: int, **options):
        super().__init__(**options)
        self.x, self.y = examples(count)
        self.size = size
        self.ended = 0

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        part = slice(index * self.size, (index + 1) * self.size)
        return self.x[part], self.y[part]

    def on_epoch_end(self):
        self.ended += 1
