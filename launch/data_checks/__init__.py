"""The checks of data before a run, for `tftpu data check`."""

from typing import Any

Pipeline = Any  # of `tftpu.input_pipelines.training`, whose import would load TensorFlow
