"""The page for scripts of Keras: each row is tried by what it names."""

import re

from tests.compatibility import fitting
from tests.support.repository.checkout import ROOT

PAGE = ROOT / "docs" / "coming-from-keras.md"


def test_each_row_is_tried_and_each_script_is_in_a_row():
    section = PAGE.read_text().split("## What is in your script")[1].split("## What differs")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[-2])}
    assert all(re.search(r"`\w+`", row.split("|")[-2]) for row in rows)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    scripts = fitting.load()
    assert {name for name in named if name not in scripts and f"def {name}(" not in tests} == set()
    assert scripts.keys() - named == set()
