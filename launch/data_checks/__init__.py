"""The checks of data before a run, for `tftpu data check`."""

from typing import Any

Pipeline = Any  # returned by `tftpu.input_pipelines.training`; importing it loads TensorFlow
