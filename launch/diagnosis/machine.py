"""The machine to examine, and the problems found on it."""

import dataclasses
import glob
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem: what is wrong, why it matters, and the command that fixes it."""

    name: str  # the same in every version, for scripts that read --json
    what: str
    why: str
    command: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine to examine; by default the one on which this process runs.

    Attributes:
        site: the folders from which packages are imported.
        root: root of the file system.
        environ: environment variables.
        python: major and minor version of Python.
    """

    site: tuple[str, ...] = dataclasses.field(default_factory=lambda: tuple(sys.path))
    root: Path = Path("/")
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    python: tuple[int, int] = sys.version_info[:2]

    def find_distribution(self, name: str) -> importlib.metadata.Distribution | None:
        """Returns the distribution that Python imports for a name; None if it is not installed."""
        found = importlib.metadata.distributions(name=name, path=list(self.site))
        return next(iter(found), None)

    def find_version(self, name: str) -> str | None:
        """Returns the version of a distribution; None if it is not installed."""
        distribution = self.find_distribution(name)
        return distribution.version if distribution else None

    def resolve_path(self, absolute: str) -> Path:
        """Returns the path under `root` of a file, given its absolute path on the machine."""
        return self.root / absolute.lstrip("/")

    def find_files(self, pattern: str) -> list[str]:
        """Returns the machine's files that match a pattern, sorted."""
        return sorted(glob.glob(str(self.resolve_path(pattern))))
