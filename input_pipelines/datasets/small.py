"""Data sets that TFDS prepares and that fit into memory."""

from tftpu.input_pipelines.datasets import embedded
from tftpu.input_pipelines.tensors import Batch


def load_split(name: str, data_dir: str | None, split: str) -> Batch:
    """Returns all examples of a split in order, as NumPy arrays by feature name.

    Raises:
        UserError: the data set or the split is unknown, not prepared, empty or damaged.
    """
    found = embedded.load_split(name, data_dir, split)
    if found is not None:
        return found
    from tftpu.input_pipelines.datasets import tfds  # importing TFDS is slow

    return tfds.load_split(tfds.open_builder(name, data_dir), split)
