"""The wheel of this checkout, and virtual environments that have only it."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.repository import checkout


def build(folder: Path) -> Path:
    """Builds the wheel into a folder; returns its path."""
    source = checkout.copy(folder / "source")
    command = [
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    subprocess.run([sys.executable, *command], check=True)
    (found,) = folder.glob("*.whl")
    return found


def install(wheel: Path, folder: Path) -> Path:
    """Makes a virtual environment with a wheel and without what it requires; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    return python


def environment() -> dict[str, str]:
    """Returns variables with which such a Python finds the packages that the wheel requires.

    They are those of this environment, without tftpu itself: files that end in .pth, by which a
    checkout is installed, count in site-packages only.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    folders = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("-packages"))]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))}
