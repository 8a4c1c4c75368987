"""Imports TensorFlow and Keras in a third of the usual time."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tftpu.engines import backend

# TensorFlow and Keras import these packages if they are installed, for features that tftpu does not
# use: converting JAX models, plotting, notebooks, data frames, scikit-learn's interface. The
# imports take as long as those of TensorFlow and Keras themselves.
UNUSED = ("IPython", "jax", "matplotlib", "pandas", "scipy", "sklearn")


def import_keras() -> None:
    """Imports Keras, and with it TensorFlow, without the packages of `UNUSED`.

    Packages that Keras's backend needs are imported all the same. The others can be imported later.
    """
    with _hidden(_list_hidden()), uncollected():
        importlib.import_module("keras")


def build_script_command(script: Path, package: str, *flags: str) -> list[str]:
    """Returns a command that imports a package quickly and then runs a script.

    Args:
        script: the script; the caller appends its arguments.
        package: "tensorflow" or "keras", imported without the packages of `UNUSED`.
        flags: command-line flags of the Python interpreter.
    """
    code = (
        "import gc, runpy, sys\n"
        "gc.disable()\n"
        f"hidden = dict.fromkeys({_list_hidden()})\n"
        "sys.modules.update(hidden)\n"
        f"import {package}\n"
        "for name in hidden:\n"
        "    del sys.modules[name]\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return [sys.executable, *flags, "-c", code, str(script)]


def _list_hidden() -> list[str]:
    needed = ("jax", "scipy") if backend.read_name() == "jax" else ()
    return [name for name in UNUSED if name not in needed]


@contextlib.contextmanager
def _hidden(names: list[str]) -> Iterator[None]:
    """Hides packages from imports within a `with` block, unless they are already imported."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportCallIssue, reportArgumentType] (None is documented to mean this)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pauses garbage collection in a `with` block; later collections skip what exists at its end.

    Half a million objects of imported modules live as long as the process. Scanning them takes two
    fifths of the import's time, and a third of a second whenever Keras collects garbage, as it does
    for each layer that it quantizes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
