"""Runs Keras's own tests of `fit`, `evaluate` and `predict` through `Trainer`; downloads nothing.

    python -m tests.peer.run CHECKOUT [--backend=jax] [--devices=4]

CHECKOUT is a checkout of Keras at the tag of the installed version. Prints what did not pass, and
the figures of `docs/coming-from-keras.md`.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import keras

from tftpu.errors import counted

ROOT = Path(__file__).parents[2]
# Needs a server of Keras's own.
_LEFT_OUT = {"remote_monitor_test.py"}
GROUPS = {
    "trainer_test.py": ["keras/src/trainers/trainer_test.py"],
    "callbacks and models": [
        "keras/src/callbacks/*_test.py",
        *(f"keras/src/models/{name}_test.py" for name in ("model", "sequential", "functional")),
    ],
}


def find_files(checkout: Path, patterns: list[str]) -> list[Path]:
    """Returns the test files of a group.

    Raises:
        SystemExit: the checkout lacks one, or has another version than the installed one.
    """
    version = re.search(r'__version__ = "(.*)"', (checkout / "keras/src/version.py").read_text())
    if version is None or version[1] != keras.__version__:
        sys.exit(f"{checkout} is not Keras {keras.__version__}, which is installed.")
    found = [path for pattern in patterns for path in sorted(checkout.glob(pattern))]
    return [path for path in found if path.name not in _LEFT_OUT]


def run(files: list[Path], backend: str, devices: int, through: bool) -> tuple[int, list[str]]:
    """Runs test files; returns the number of tests that passed, and the names of the others.

    Args:
        files: the files, which are copied: beside Keras's sources they would import those.
        backend: Keras's backend.
        devices: the number of virtual devices.
        through: whether to run them through `Trainer`; otherwise they are Keras's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            shutil.copy(file, folder)
        environment = {
            **os.environ,
            "KERAS_BACKEND": backend,
            "PEER_DEVICES": str(devices),
            "PYTHONPATH": str(ROOT),
        }
        plugin = ["-p", "tests.peer.through_trainer"] if through else []
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:warnings", "--timeout=300", "-rfE"]
        command = [sys.executable, "-m", "pytest", *plugin, *words, "--tb=line", "."]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    others = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0, others


def main() -> None:
    """Prints a line for each group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--backend", default="tensorflow", choices=["tensorflow", "jax"])
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_args()
    for group, patterns in GROUPS.items():
        files = find_files(given.checkout, patterns)
        expected, left = run(files, given.backend, given.devices, through=False)
        passed, others = run(files, given.backend, given.devices, through=True)
        for name in sorted({*others} - {*left}):
            print(f"  {name}")
        devices = counted(given.devices, "device")
        print(
            f"{group}, {given.backend}, {devices}: {passed} of {expected} that "
            f"Keras {keras.__version__} passes ({datetime.date.today()})",
            flush=True,
        )


if __name__ == "__main__":
    main()
