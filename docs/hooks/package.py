"""Lays the checkout's four folders out as the one package that users import.

`tftpu.models`, `tftpu.input_pipelines` and `tftpu.launch` are folders beside `tftpu/` in the
checkout. The API reference is read from the source, so it needs them where they are installed.
"""

import shutil
import tempfile
from pathlib import Path

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parent.parent.parent
BELOW = ("models", "input_pipelines", "launch")


# Before mkdocstrings, which takes no notice of a folder that is not there yet.
@event_priority(100)
def on_config(config):
    """Copies the package to `build/docs/tftpu`, where mkdocstrings looks for it."""
    parent = ROOT / "build" / "docs"
    parent.mkdir(parents=True, exist_ok=True)
    # Another build may be reading the folder: it changes places with a complete one.
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        fresh, old, package = Path(scratch) / "fresh", Path(scratch) / "old", parent / "tftpu"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tftpu", fresh, ignore=ignored)
        for folder in BELOW:
            shutil.copytree(ROOT / folder, fresh / folder, ignore=ignored)
        if package.exists():
            package.rename(old)
        fresh.rename(package)
    return config


def on_page_markdown(markdown, page, config, files):
    """Replaces a line `{{ include FILE }}` by a file of the checkout's root."""
    prefix = "{{ include "
    if not markdown.startswith(prefix):
        return markdown
    name = markdown.removeprefix(prefix).split()[0]
    return (ROOT / name).read_text().replace("](docs/", "](")
