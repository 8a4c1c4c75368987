"""The source text of the running Python's standard library, as a TFDS data set."""

import hashlib
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

# Folders of third-party packages, tests (a third of the text), and generated tables.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "encodings",
    "pydoc_data",
}


class PythonSource(tfds.core.GeneratorBasedBuilder):
    """Python's standard library, one example per file; one file in fifty is for testing."""

    VERSION = tfds.core.Version("1.0.0")
    # The standard library's text differs between versions of Python.
    BUILDER_CONFIGS = [  # noqa: RUF012 (the interface of TFDS)
        tfds.core.BuilderConfig(name=f"python-{platform.python_version()}")
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterable[Any]]:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [
            path
            for path in sorted(root.rglob("*.py"))
            if not _LEFT_OUT.intersection(path.relative_to(root).parts)
        ]
        test = [path for path in paths if _is_for_testing(path.relative_to(root))]
        train = [path for path in paths if path not in set(test)]
        return {
            "train": self._generate_examples(root, train),
            "test": self._generate_examples(root, test),
        }

    def _generate_examples(
        self, root: Path, paths: list[Path]
    ) -> Iterator[tuple[str, dict[str, bytes]]]:
        for path in paths:
            text = path.read_bytes()
            if text:
                yield str(path.relative_to(root)), {"text": text}


def _is_for_testing(path: Path) -> bool:
    """Returns whether a file is for testing: about one in fifty, by a hash of its path."""
    return hashlib.sha256(path.as_posix().encode()).digest()[0] * 50 < 256
