"""Fixtures for tests of conversions."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tftpu.input_pipelines.convert.readers import images, text


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes 60 different images of three classes."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(60):
        folder = root / ["cat", "dog", "owl"][number % 3]
        folder.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (9, 8, 3), np.uint8)
        (folder / f"{number}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    return root


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of few examples, so that small sources have several."""
    monkeypatch.setattr(images, "PART_EXAMPLES", 7)
    monkeypatch.setattr(text, "PART_BYTES", 2000)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Writes two parts of text; returns their source."""
    for name in ("a", "b"):
        words = " ".join(f"{name}{number}" for number in range(400))
        (tmp_path / f"{name}.txt").write_text(words)
    return f"text:{tmp_path}/*.txt"


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yields a folder in memory, where fsync is free."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)
