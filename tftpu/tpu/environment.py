"""Detects this machine's TPU, and sets environment variables before TensorFlow is imported."""

import glob
import importlib.util
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

# Device files of a host's TPU chips.
UP_TO_V4 = "/dev/accel[0-9]*"
FROM_V5E = "/dev/vfio/[0-9]*"


def prepare(environ: MutableMapping[str, str] = os.environ, root: str = "/") -> None:
    """Sets the environment variables that TensorFlow and libtpu need on this machine.

    From v5e on, tensorflow-tpu reaches a TPU through PJRT, which must be enabled; the settings are
    those of Keras's own tests on TPUs. Without tensorflow-tpu, JAX uses the TPU. Without a TPU,
    libtpu would query a metadata server that does not exist, and `import tensorflow` would hang for
    minutes. Variables that are already set keep their values.

    Args:
        environ: the environment variables, changed in place.
        root: root of the file system.
    """
    spec = importlib.util.find_spec("libtpu")
    if spec is None or not spec.submodule_search_locations:
        return
    library = Path(spec.submodule_search_locations[0]) / "libtpu.so"
    if glob.glob(root + FROM_V5E):
        if not is_installed("tensorflow-tpu"):
            return
        environ.setdefault("PJRT_DEVICE", "TPU")
        environ.setdefault("NEXT_PLUGGABLE_DEVICE_USE_C_API", "true")
        environ.setdefault("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", str(library))
        environ.setdefault("TF_XLA_FLAGS", "--tf_mlir_enable_mlir_bridge=true")
        environ.setdefault("TPU_NAME", "local")
    elif not glob.glob(root + UP_TO_V4):
        environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def quieten_tensorflow(
    environ: MutableMapping[str, str] = os.environ, gpu: str = "/dev/nvidiactl"
) -> None:
    """Hides log lines of TensorFlow's C++ code, whose errors are also raised as exceptions.

    A damaged picture, for example, would write a line each time that it is decoded. TensorFlow
    reads the variable when it is imported, so this does nothing later, and nothing if the variable
    is already set.

    Args:
        environ: the environment variables, changed in place.
        gpu: the device file of NVIDIA's driver. If it exists, errors are shown.
    """
    if "tensorflow" not in sys.modules:
        # If TensorFlow does not use a GPU, only an error in its log says why.
        level = "2" if os.path.exists(gpu) else "3"
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level)


def has_tpu(root: str = "/") -> bool:
    """Returns whether TPU chips are attached to this machine."""
    return any(glob.glob(root + pattern) for pattern in (UP_TO_V4, FROM_V5E))


def is_installed(distribution: str) -> bool:
    """Returns whether a package is installed in this environment."""
    from importlib import metadata  # at the top, it would double the time of `import tftpu`

    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def can_jax_drive_tpus(is_installed: Callable[[str], bool] = is_installed) -> bool:
    """Returns whether JAX can use a TPU with the packages installed here, and TensorFlow cannot.

    Args:
        is_installed: a function that returns whether a package is installed.
    """
    return not is_installed("tensorflow-tpu") and all(map(is_installed, ("jax", "libtpu")))
