"""The checks of data before a run, for `tftpu data check`."""

from typing import Any

Pipeline = Any  # what `input_pipelines.training` returns; importing its type loads TensorFlow
