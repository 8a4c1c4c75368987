"""Data sets that TFDS prepares and that fit into memory."""

from tftpu.input_pipelines.datasets import embedded
from tftpu.input_pipelines.tensors import Batch


def load_split(name: str, data_dir: str | None, split: str) -> Batch:
    """Returns all examples of a split in order, as NumPy arrays by feature name.

    Raises:
        UserError: an unknown data set or split, or a data set that is not prepared.
    """
    found = embedded.load_split(name, data_dir, split)
    if found is not None:
        return found
    from tftpu.input_pipelines.datasets import tfds  # slow to import

    return tfds.load_split(tfds.open_builder(name, data_dir), split)
