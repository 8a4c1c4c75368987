"""Imports TensorFlow for commands, and builds the command lines of further processes."""

import importlib.util
import os
import sys
from collections.abc import Sequence

from tftpu import installation, quick_import
from tftpu.engines import backend
from tftpu.errors import UserError

# The working directory is added last, so that a folder `tftpu` in it does not replace the package.
_MAIN = "import os, sys; from tftpu.launch.main import run; sys.path.append(os.getcwd()); run()"


def build_command(words: Sequence[str]) -> list[str]:
    """Returns the command of another process that runs `tftpu` with the given arguments."""
    # -P leaves out the working directory, which `_MAIN` adds last.
    flags = ["-P", *["-O"] * sys.flags.optimize]
    return [sys.executable, *flags, "-c", _MAIN, *words]


def require_tensorflow() -> None:
    """Raises `UserError`, with the command to run, if no TensorFlow is installed."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            "TensorFlow is not installed, because the right package depends on the machine. Run "
            f"`{installation.command('cpu')}`; with an NVIDIA GPU "
            f"`{installation.command('gpu')}`; on a TPU VM, Colab or Kaggle "
            f"`{installation.command('tpu')}`."
        )


def import_tensorflow() -> None:
    """Imports TensorFlow and Keras, without the optional packages that no command uses.

    Raises:
        UserError: TensorFlow is not installed, or Keras is set to another backend.
    """
    require_tensorflow()
    backend.check_keras()
    if "keras" not in sys.modules and "tensorflow" not in sys.modules:
        quick_import.import_keras()


def leave_devices_alone() -> None:
    """Hides GPUs from TensorFlow and sets JAX to the CPU, for a command that uses no accelerator.

    GPUs that CUDA_VISIBLE_DEVICES names stay visible.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    if "jax" in sys.modules:  # code that imports JAX later chooses the CPU itself
        from tftpu.engines.jax.cluster import use_cpu

        use_cpu()
