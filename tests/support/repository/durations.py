"""Turns pytest's reports into the seconds of each test file: `make durations` writes them.

    python -m tests.support.repository.durations fast.xml slow.xml

The order of files in tests/conftest.py follows them: the longest first, so that no process is left
with a long file when the others have ended.
"""

import collections
import json
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

FILE = pathlib.Path(__file__).parents[2] / "durations.json"


def read() -> dict[str, float]:
    """Returns the seconds of test files by tier and path, such as `"slow tests/test_x.py"`."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(reports: list[str]) -> None:
    """Writes the seconds of the files in reports of `pytest --junitxml`, named by their tiers."""
    seconds = read()
    for report in map(pathlib.Path, reports):
        tier = report.stem.rstrip("0123456789")
        found: collections.Counter[str] = collections.Counter()
        for case in ElementTree.parse(report).iter("testcase"):
            path = case.get("classname", "").replace(".", "/") + ".py"
            found[f"{tier} {path}"] += float(case.get("time", 0))
        seconds.update({file: round(time, 1) for file, time in found.items()})
    kept = {file: time for file, time in sorted(seconds.items()) if time >= 1}
    FILE.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":
    write(sys.argv[1:])
