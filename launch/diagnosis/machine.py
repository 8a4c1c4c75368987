"""The machine under examination, and what may be found on it."""

import dataclasses
import glob
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is wrong: what, why it matters, and the one command that mends it."""

    name: str  # does not change between versions, for scripts that read --json
    what: str
    why: str
    command: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where to look. The defaults are this process's own machine.

    Attributes:
        site: the folders that packages are imported from.
        root: of the file system.
        environ: environment variables.
        python: version.
    """

    site: tuple[str, ...] = dataclasses.field(default_factory=lambda: tuple(sys.path))
    root: Path = Path("/")
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    python: tuple[int, int] = sys.version_info[:2]

    def distribution(self, name: str) -> importlib.metadata.Distribution | None:
        """An installed distribution; of two of the same name, the one that is imported."""
        found = importlib.metadata.distributions(name=name, path=list(self.site))
        return next(iter(found), None)

    def version(self, name: str) -> str | None:
        distribution = self.distribution(name)
        return distribution and distribution.version

    def path(self, absolute: str) -> Path:
        """A path of the machine's file system."""
        return self.root / absolute.lstrip("/")

    def matches(self, pattern: str) -> list[str]:
        """The machine's files of a pattern, sorted."""
        return sorted(glob.glob(str(self.path(pattern))))
