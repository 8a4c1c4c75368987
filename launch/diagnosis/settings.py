"""Settings of a user's account and shell that change what Keras computes, or make it fail."""

from tftpu.engines import backend
from tftpu.launch.diagnosis.machine import Machine, Problem

# Each of these variables changes a run's rounding, its random numbers or its dtypes.
_VARIABLES = (
    *("JAX_ENABLE_X64", "JAX_DEFAULT_DTYPE_BITS", "JAX_DEFAULT_MATMUL_PRECISION"),
    *("JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_PRNG_IMPL", "JAX_NUMPY_DTYPE_PROMOTION"),
    *("XLA_FLAGS", "TF_XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE"),
    *("TF_ENABLE_AUTO_MIXED_PRECISION", "KERAS_NNX_ENABLED"),
)
_DEFAULTS = {
    "floatx": backend.FLOATX,
    "epsilon": 1e-7,
    "image_data_format": "channels_last",
    "nnx_enabled": False,
}


def describe(machine: Machine) -> dict[str, str]:
    """Returns the facts for the top of the report: settings that change the results of a run."""
    found = [f"{name}={machine.environ[name]}" for name in _VARIABLES if name in machine.environ]
    found += [f"{text} in keras.json" for text in _list_changed(machine)]
    return {"Changes numbers": ", ".join(found) or "nothing is set"}


def find_problems(machine: Machine) -> list[Problem]:
    """Finds Keras settings that make training fail, or change its results."""
    found = []
    name = machine.environ.get("KERAS_BACKEND") or backend.SERVED[0]
    if name not in backend.SERVED:
        found.append(
            Problem(
                "keras-backend",
                f"KERAS_BACKEND is {name!r}.",
                "tftpu needs Keras's TensorFlow or JAX backend: no command can train.",
                "unset KERAS_BACKEND",
            )
        )
    # The values that TensorFlow reads as true.
    if machine.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1"):
        found.append(
            Problem(
                "legacy-keras",
                "TF_USE_LEGACY_KERAS makes tf.keras Keras 2.",
                "tftpu trains models of Keras 3, and refuses models that are built with tf.keras.",
                "unset TF_USE_LEGACY_KERAS",
            )
        )
    unusable, changed = backend.describe_unusable(machine.environ), _list_changed(machine)
    file = backend.find_settings_file(machine.environ)
    if unusable:
        found.append(
            Problem(
                "keras-settings",
                unusable,
                "Keras reads its settings when it is imported: no command can train.",
                f"rm {file}" if file.exists() else "unset KERAS_NNX_ENABLED",
            )
        )
    elif changed:
        found.append(
            Problem(
                "keras-settings",
                f"{file} sets {', '.join(changed)}.",
                "Keras layers and losses take these settings as defaults, so they compute "
                "other results than on other machines. The models of the zoo do not.",
                f"rm {file}",
            )
        )
    return found


def _list_changed(machine: Machine) -> list[str]:
    """Returns the settings in Keras's file that differ from Keras's defaults."""
    settings = backend.read_settings(machine.environ) or {}
    return [
        f"{name}={settings[name]!r}"
        for name, default in _DEFAULTS.items()
        if settings.get(name, default) != default
    ]
