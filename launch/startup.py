"""Checks and settings before TensorFlow is imported."""

import importlib.util
import os

from tftpu.errors import UserError


def require_tensorflow() -> None:
    """Raises `UserError`, with the command to run, if no TensorFlow is installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # chatter of the C++ side
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            "TensorFlow is not installed, because the right package depends on the machine. Run "
            "`pip install 'tftpu[cpu]'`, or [gpu], or [tpu] on a TPU VM, Colab or Kaggle."
        )
