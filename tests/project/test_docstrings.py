"""Docstrings open with a verb or a noun, as Keras's do; no words that read as translated."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository.checkout import ROOT

FOLDERS = ("tftpu", "models", "input_pipelines", "launch")
OPENINGS = ("What", "Whether", "Of", "As", "So", "Where", "That")

# In parts, so that the search below does not find this file.
TRANSLATED = "|".join(("men" + "d(s|ed)?", "goes" + " on", "taken" + " up"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the docstring of a module and of its public functions and classes."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        public = isinstance(node, ast.Module) or (
            isinstance(node, kinds) and not node.name.startswith("_")
        )
        text = ast.get_docstring(node) if public else None
        if text:
            yield getattr(node, "lineno", 1), text


def test_no_public_docstring_opens_with_a_question():
    wrong = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in docstrings(path):
                if re.match(rf"({'|'.join(OPENINGS)})\b", text):
                    first = text.splitlines()[0]
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {first}")
    assert not wrong, "open with a verb, as Returns or Loads; a class or an attribute with a noun"


def test_no_text_reads_as_translated():
    search = ["git", "grep", "-nwE", TRANSLATED, "--", "*.py", "*.md", "*.ipynb"]
    found = subprocess.run(search, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr  # 1: nothing was found
    assert found.stdout.splitlines() == [], f"write these words differently: {TRANSLATED}"


def test_the_check_reads_public_docstrings_only(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('def f():\n    """What it does."""\n\n\ndef _g():\n    """Of no account."""\n')
    assert [text for _, text in docstrings(path)] == ["What it does."]
