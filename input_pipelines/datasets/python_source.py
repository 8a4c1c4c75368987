"""The source text of the running Python's standard library, as a TFDS data set."""

import hashlib
import platform
import sysconfig
from pathlib import Path

import tensorflow_datasets as tfds

# Code that others put there, tests (a third of the text), and generated tables.
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
    """Python's standard library, a file an example; one file in fifty is for testing."""

    VERSION = tfds.core.Version("1.0.0")
    # Another Python has another text.
    BUILDER_CONFIGS = [  # noqa: RUF012 (TFDS's own interface)
        tfds.core.BuilderConfig(name=f"python-{platform.python_version()}")
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        )

    def _split_generators(self, dl_manager):
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [
            path
            for path in sorted(root.rglob("*.py"))
            if not _LEFT_OUT.intersection(path.relative_to(root).parts)
        ]
        test = [path for path in paths if _is_test(path.relative_to(root))]
        train = [path for path in paths if path not in set(test)]
        return {
            "train": self._generate_examples(root, train),
            "test": self._generate_examples(root, test),
        }

    def _generate_examples(self, root: Path, paths: list[Path]):
        for path in paths:
            text = path.read_bytes()
            if text:
                yield str(path.relative_to(root)), {"text": text}


def _is_test(path: Path) -> bool:
    """One file in fifty, by its name, so that a split never moves a file to the other side."""
    return hashlib.sha256(path.as_posix().encode()).digest()[0] * 50 < 256
