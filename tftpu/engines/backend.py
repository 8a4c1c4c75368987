"""The backend of Keras in this process: which one it is, and whether tftpu trains on it."""

import importlib.metadata
import os
import sys
from typing import Any

from tftpu.errors import UserError

SERVED = ("tensorflow", "jax")


def prefer_tensorflow() -> None:
    """Makes Keras, which reads its backend once, take TensorFlow unless the user chose another."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def name() -> str:
    """Returns the backend that Keras runs on, or will run on when it is imported."""
    keras: Any = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        return keras.config.backend()
    return os.environ["KERAS_BACKEND"]


def use(wanted: str) -> None:
    """Makes Keras run on a backend.

    Args:
        wanted: "tensorflow" or "jax".

    Raises:
        UserError: Keras is loaded already, with another backend.
    """
    check_keras()
    if name() == wanted:
        return
    if "keras" in sys.modules:
        raise UserError(
            f"Keras is loaded already, on {name()}, and engine={wanted!r} needs it on {wanted}: "
            f"set KERAS_BACKEND={wanted} before Python starts, or call tftpu.connect() before "
            "anything imports keras."
        )
    os.environ["KERAS_BACKEND"] = wanted


def check_keras() -> None:
    """Raises `UserError` for Keras 2, and for Keras 3 on a backend that no engine serves.

    It imports nothing: Keras reads its backend at import, once.
    """
    keras: Any = sys.modules.get("keras")
    version = getattr(keras, "__version__", None) or _installed_version()
    if version.startswith("2."):
        raise UserError(
            f"Keras {version} is installed, and tftpu trains models of Keras 3: run "
            "`pip install 'keras>=3.14,<3.16'` and `import keras` rather than tf.keras."
        )
    backend = name()
    if backend not in SERVED:
        named = os.environ.get("KERAS_BACKEND") == backend
        where = f"KERAS_BACKEND={backend}" if named else f"backend {backend!r} of keras.json"
        raise UserError(
            f"Keras runs on {backend} ({where}), and tftpu trains on Keras's TensorFlow and JAX "
            "backends: set KERAS_BACKEND=tensorflow or jax before Python starts, or `import tftpu` "
            "before keras with KERAS_BACKEND unset."
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
