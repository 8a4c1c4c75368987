"""Starts commands: imports TensorFlow in half the usual time, and builds lines of processes."""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence

from tftpu import installation
from tftpu.engines import backend
from tftpu.errors import UserError

# TensorFlow and Keras import these packages if they are installed, for features that no command
# uses: converting JAX models, plotting, notebooks, data frames, scikit-learn's interface. The
# imports take as long as those of TensorFlow and Keras themselves.
UNUSED = ("IPython", "jax", "matplotlib", "pandas", "scipy", "sklearn")

# The working directory is added last, so that a folder `tftpu` in it does not replace the package.
_MAIN = "import os, sys; from tftpu.launch.main import run; sys.path.append(os.getcwd()); run()"


def build_command(words: Sequence[str]) -> list[str]:
    """Returns the command of a process that runs `tftpu` with these words as this one does."""
    # -P, because `_MAIN` adds the working directory.
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
        needed = ("jax", "scipy") if backend.read_name() == "jax" else ()
        with _hidden(tuple(name for name in UNUSED if name not in needed)), _uncollected():
            importlib.import_module("keras")


def leave_devices_alone() -> None:
    """Makes TensorFlow start without GPUs and JAX on the CPU: the command runs nothing on them.

    GPUs that CUDA_VISIBLE_DEVICES names stay visible.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    if "jax" in sys.modules:  # which is imported later only by what chooses the CPU itself
        from tftpu.engines.jax.cluster import use_cpu

        use_cpu()


@contextlib.contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Makes packages appear as not installed within the block, unless they are already imported."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportCallIssue, reportArgumentType] (None is documented to mean this)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Excludes the objects that the block makes from garbage collection, now and later.

    Half a million objects of imported modules live as long as the process. Scanning them takes two
    fifths of the import's time, and a third of a second for each layer that Keras quantizes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
