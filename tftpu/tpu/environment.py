"""The environment variables of a TPU, set before TensorFlow loads and reads them."""

import glob
import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

# Device files of the chips of this machine.
UP_TO_V4 = "/dev/accel[0-9]*"
FROM_V5E = "/dev/vfio/[0-9]*"


def prepare(environ: MutableMapping[str, str] = os.environ, root: str = "/") -> None:
    """Sets what TensorFlow and libtpu need here; what the user has set stays.

    From v5e on, TensorFlow drives a TPU through PJRT, which has to be chosen (the recipe is that
    of Keras's own tests on TPUs). On a machine without a TPU, libtpu would ask a metadata server
    that is not there, and `import tensorflow` would hang for minutes.

    Args:
        environ: the variables.
        root: of the file system.
    """
    spec = importlib.util.find_spec("libtpu")
    if spec is None or not spec.submodule_search_locations:
        return
    library = Path(spec.submodule_search_locations[0]) / "libtpu.so"
    if glob.glob(root + FROM_V5E):
        environ.setdefault("PJRT_DEVICE", "TPU")
        environ.setdefault("NEXT_PLUGGABLE_DEVICE_USE_C_API", "true")
        environ.setdefault("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", str(library))
        environ.setdefault("TF_XLA_FLAGS", "--tf_mlir_enable_mlir_bridge=true")
        environ.setdefault("TPU_NAME", "local")
    elif not glob.glob(root + UP_TO_V4):
        environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
