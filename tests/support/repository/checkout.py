"""Copies of this checkout, for builds: one in place would reuse what earlier builds left."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("tftpu", "models", "input_pipelines", "launch")


def copy(target: Path) -> Path:
    """Copies what the package is built from into a folder; returns the folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(ROOT / name, target)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    return target
