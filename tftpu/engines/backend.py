"""The backend of Keras in this process: which one it is, and whether tftpu trains on it."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tftpu.errors import UserError

SERVED = ("tensorflow", "jax")
FLOATX = "float32"
_ONLY_FLOAT32 = (
    ", and tftpu keeps weights in float32: set it to 'float32', and choose the precision of the "
    "computation with train.precision or tftpu.set_precision, such as 'mixed_bfloat16'."
)


class OtherBackend(UserError):  # noqa: N818 (the name says what was found)
    """Raised if Keras is already imported with another backend than the one that is needed.

    Attributes:
        wanted: the backend that is needed.
    """

    def __init__(self, message: str, wanted: str):
        super().__init__(message)
        self.wanted = wanted


def prefer_tensorflow() -> None:
    """Makes Keras use TensorFlow when it is imported, unless KERAS_BACKEND is already set."""
    if not os.environ.get("KERAS_BACKEND"):
        os.environ["KERAS_BACKEND"] = "tensorflow"


def read_name() -> str:
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
        OtherBackend: Keras is already imported with another backend.
    """
    check_keras()
    if read_name() == wanted:
        return
    if "keras" in sys.modules:
        raise OtherBackend(
            f"Keras is already loaded with the backend {read_name()}, but engine={wanted!r} needs "
            f"{wanted}: set KERAS_BACKEND={wanted} before Python starts, or call "
            f"tftpu.connect(engine={wanted!r}) before anything imports keras.",
            wanted,
        )
    os.environ["KERAS_BACKEND"] = wanted


def check_keras() -> None:
    """Raises `UserError` for Keras 2, and for Keras 3 with settings that no engine supports.

    This does not import Keras, because Keras reads its settings only once, when it is imported.
    """
    keras: Any = sys.modules.get("keras")
    version = getattr(keras, "__version__", None) or _read_installed_version()
    if version.startswith("2."):
        raise UserError(
            f"Keras {version} is installed, but tftpu trains models of Keras 3: run `pip install "
            "'keras>=3.14,<3.16'`, and write `import keras` instead of tf.keras."
        )
    backend = read_name()
    if backend not in SERVED:
        named = os.environ.get("KERAS_BACKEND") == backend
        where = f"KERAS_BACKEND={backend}" if named else f"backend {backend!r} of keras.json"
        raise UserError(
            f"Keras runs on {backend} ({where}), but tftpu trains only on Keras's TensorFlow and "
            "JAX backends: set KERAS_BACKEND=tensorflow or jax before Python starts, or `import "
            "tftpu` before keras with KERAS_BACKEND unset."
        )
    if hasattr(keras, "config"):
        floatx = getattr(keras.config, "floatx", lambda: FLOATX)()
        said = "" if floatx == FLOATX else f"Keras's floatx is {floatx!r}{_ONLY_FLOAT32}"
    else:
        said = describe_unusable(os.environ)
    if said:
        raise UserError(said)


def find_settings_file(environ: Mapping[str, str]) -> Path:
    """Returns the path of the settings file that Keras reads at import; it may not exist."""
    home = Path(environ.get("HOME") or "~").expanduser()
    writable = home if os.access(home, os.W_OK) else Path("/tmp")
    return Path(environ.get("KERAS_HOME") or writable / ".keras").expanduser() / "keras.json"


def read_settings(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the settings in Keras's file; {} if Keras ignores it, None if Keras cannot start."""
    try:
        found = json.loads(find_settings_file(environ).read_bytes())
    except (ValueError, FileNotFoundError):
        return {}  # Keras, too, ignores a file that is missing or is not JSON
    except (OSError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def describe_unusable(environ: Mapping[str, str]) -> str:
    """Returns why no engine can use the settings in Keras's file; "" if an engine can."""
    file, settings = find_settings_file(environ), read_settings(environ)
    if settings is None:
        return f"{file} holds no settings of Keras: remove it, and Keras writes it anew."
    floatx = settings.get("floatx", FLOATX)
    if floatx != FLOATX:
        return f"{file} sets floatx to {floatx!r}{_ONLY_FLOAT32}"
    order, epsilon = settings.get("image_data_format", "channels_last"), settings.get("epsilon", 0)
    if order not in ("channels_last", "channels_first") or not isinstance(epsilon, float | int):
        return f"{file} has settings that Keras does not know: remove it, and Keras writes it anew."
    named = environ.get("KERAS_NNX_ENABLED", str(settings.get("nnx_enabled", False)))
    if named.lower() in ("true", "1"):
        return (
            "KERAS_NNX_ENABLED, or nnx_enabled in keras.json, makes Keras use Flax's variables, "
            "but tftpu needs Keras's: unset it."
        )
    return ""


def check_model(model: Any) -> None:
    """Raises `UserError` for a model of Keras 2."""
    legacy = ("tf_keras", "keras.src.engine", "keras.engine", "tensorflow.python.keras")
    if any(base.__module__.startswith(legacy) for base in type(model).__mro__):
        raise UserError(
            f"{type(model).__name__} is a model of Keras 2 (tf_keras), but tftpu trains models of "
            "Keras 3: write `import keras` instead of tf_keras, and unset TF_USE_LEGACY_KERAS if "
            "you use tf.keras."
        )


def _read_installed_version() -> str:
    from importlib import metadata  # at the top, it would double the time of `import tftpu`

    try:
        return metadata.version("keras")
    except metadata.PackageNotFoundError:
        return ""
