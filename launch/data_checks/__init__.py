"""The checks of data before a run, for `tftpu data check`."""

from typing import Any

# The result of `input_pipelines.training`. Importing its type would load TensorFlow.
Pipeline = Any
