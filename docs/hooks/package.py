"""Lays the checkout's four folders out as the one package that users import.

`tftpu.models`, `tftpu.input_pipelines` and `tftpu.launch` are folders beside `tftpu/` in the
checkout. The API reference is read from the source, so it needs them where they are installed.
"""

import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BELOW = ("models", "input_pipelines", "launch")


def on_config(config):
    """Copies the package to `build/docs/tftpu`, where mkdocstrings looks for it."""
    package = ROOT / "build" / "docs" / "tftpu"
    shutil.rmtree(package, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tftpu", package, ignore=ignored)
    for folder in BELOW:
        shutil.copytree(ROOT / folder, package / folder, ignore=ignored)
    return config


def on_page_markdown(markdown, page, config, files):
    """Replaces a line `{{ include FILE }}` by a file of the checkout's root."""
    prefix = "{{ include "
    if not markdown.startswith(prefix):
        return markdown
    name = markdown.removeprefix(prefix).split()[0]
    return (ROOT / name).read_text().replace("](docs/", "](")
