"""Checks that the Keras of this process is one that tftpu trains with."""

import importlib.metadata
import os
import sys
from typing import Any

from tftpu.errors import UserError


def check_keras() -> None:
    """Raises `UserError` for Keras 2, and for Keras 3 on another backend than TensorFlow.

    It imports nothing: Keras reads its backend at import, once.
    """
    keras: Any = sys.modules.get("keras")
    version = getattr(keras, "__version__", None) or _installed_version()
    if version.startswith("2."):
        raise UserError(
            f"Keras {version} is installed, and tftpu trains models of Keras 3: run "
            "`pip install 'keras>=3.14,<3.16'` and `import keras` rather than tf.keras."
        )
    backend = keras.config.backend() if hasattr(keras, "config") else os.environ["KERAS_BACKEND"]
    if backend != "tensorflow":
        named = os.environ.get("KERAS_BACKEND") == backend
        where = f"KERAS_BACKEND={backend}" if named else f"backend {backend!r} of keras.json"
        raise UserError(
            f"Keras runs on {backend} ({where}), and tftpu trains on Keras's TensorFlow backend: "
            "set KERAS_BACKEND=tensorflow before Python starts, or `import tftpu` before keras "
            "with KERAS_BACKEND unset."
        )


def check_model(model: Any) -> None:
    """Raises `UserError` for a model of Keras 2."""
    legacy = ("tf_keras", "keras.src.engine", "keras.engine", "tensorflow.python.keras")
    if any(base.__module__.startswith(legacy) for base in type(model).__mro__):
        raise UserError(
            f"{type(model).__name__} is a model of Keras 2 (tf_keras), and tftpu trains models of "
            "Keras 3: write `import keras` instead of tf_keras, and unset TF_USE_LEGACY_KERAS if "
            "you use tf.keras."
        )


def _installed_version() -> str:
    try:
        return importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        return ""
