"""A simulated machine on disk for `tftpu doctor`: site-packages, /dev, /proc and /tmp."""

import base64
import hashlib
from pathlib import Path

from tftpu.launch.commands.checking import doctor
from tftpu.launch.diagnosis import wheels
from tftpu.launch.diagnosis.machine import Machine, Problem

V5E = "/dev/vfio/0"  # the device file of a chip, from v5e on
V3 = "/dev/accel0"  # and up to v4


class Scratch:
    """A machine on disk, with site-packages as pip leaves them."""

    def __init__(self, folder: Path):
        self.site = folder / "site-packages"
        self.root = folder / "root"
        self.environ = {"HOME": str(folder), "NO_GCE_CHECK": "true"}
        self.python = (3, 12)
        for name, version in (
            *(("keras", "3.15.1"), ("tensorboard", "2.20.0"), ("setuptools", "80.9.0")),
            *(("tensorflow-datasets", "4.9.10"), ("importlib_resources", "7.1.0")),
        ):
            self.install(name, version)

    def install(self, name: str, version: str) -> None:
        """Writes files, METADATA and RECORD as `pip install --no-deps` does; the last one wins."""
        files = {f"{name.replace('-', '_')}/__init__.py": f"# {name} {version}\n"}
        if name in wheels.WHEELS:
            files = {
                "tensorflow/__init__.py": "# the same in all of them\n",
                "tensorflow/python/__init__.py": "",
                "tensorflow/python/client.py": f"# {version}\n" + "x = 1\n" * 100,
                "tensorflow/libtensorflow_framework.so.2": f"{name} {version}".ljust(40) * 1000,
                "tensorflow/python/build_info.py": f"build = {name!r}\n".ljust(60, "#"),
            }
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        record = []
        for path, text in files.items():
            target = self.site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            record.append(f"{path},sha256={digest.decode().rstrip('=')},{len(text)}")
        (info / "RECORD").write_text("\n".join([*record, f"{info.name}/RECORD,,"]) + "\n")

    def uninstall(self, name: str) -> None:
        """Removes every file of the RECORD, whoever wrote it last, as `pip uninstall` does."""
        (info,) = self.site.glob(f"{name.replace('-', '_')}-*.dist-info")
        for line in (info / "RECORD").read_text().splitlines():
            (self.site / line.split(",")[0]).unlink(missing_ok=True)
        (info / "METADATA").unlink()
        info.rmdir()

    def replace(self, name: str, version: str) -> None:
        """Installs another version."""
        self.uninstall(name)
        self.install(name, version)

    def write(self, path: str, text: str = "") -> Path:
        """Writes a file of the machine; returns its real path."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def examine(self, *buckets: str) -> tuple[dict[str, str], list[Problem]]:
        """Returns the facts and the problems that doctor finds."""
        machine = Machine((str(self.site),), self.root, self.environ, self.python)
        return doctor.examine(machine, list(buckets))

    def problem(self, *buckets: str) -> Problem:
        """Returns the only problem that doctor finds."""
        _, problems = self.examine(*buckets)
        (problem,) = problems
        return problem
