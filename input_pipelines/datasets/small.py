"""Data sets that TFDS prepares and that fit into memory."""

from tftpu.input_pipelines.datasets import embedded
from tftpu.input_pipelines.tensors import Batch


def in_memory(name: str, data_dir: str | None, split: str) -> Batch:
    """Returns all examples of a split in order, as NumPy arrays by feature name.

    Raises:
        UserError: an unknown data set or split, or a data set that is not prepared.
    """
    found = embedded.in_memory(name, data_dir, split)
    if found is not None:
        return found
    from tftpu.input_pipelines.datasets import tfds  # slow to import

    return tfds.in_memory(tfds.prepared(name, data_dir), split)
