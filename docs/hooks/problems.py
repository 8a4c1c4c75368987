"""Writes the tables of known problems while the site is built, from the code that reports them.

A page requests them with a separate line: `{{ failures }}`, the errors that a run explains, or
`{{ problems }}`, what `tftpu doctor` finds.
"""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

_VALUE = re.compile(r"\{\w+\}")  # what the message of the failure fills in


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replaces the lines `{{ failures }}` and `{{ problems }}` of a page."""
    for name, table in (("failures", failures), ("problems", problems)):
        line = re.compile(rf"^\{{\{{ {name} \}}\}}$", re.M)
        markdown = line.sub(lambda _, table=table: table(), markdown)
    return markdown


def failures() -> str:
    """Returns what happened and what to do, for each known error of TensorFlow, JAX and libtpu."""
    from tftpu.launch.failures import FAILURES

    rows = {
        (_VALUE.sub("…", failure.meaning), _VALUE.sub("…", failure.remedy)): None
        for failure in FAILURES
        if failure.remedy
    }
    return _table(("what happened", "what to do"), list(rows))


def problems() -> str:
    """Returns what is wrong and why that matters, for each problem that `tftpu doctor` knows."""
    found = importlib.util.find_spec("tftpu.launch.diagnosis")
    rows = []
    for path in sorted(Path(found.submodule_search_locations[0]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
                what, why = (_read_text(argument) for argument in node.args[1:3])
                if what and why:  # others are put together when they are found
                    rows.append((what, why))
    return _table(("what is wrong", "why it matters"), rows)


def _read_text(node: ast.expr) -> str:
    """Returns the text of a string, with names or … for values; "" for other expressions."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_read_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return node.value.id.upper() if isinstance(node.value, ast.Name) else "…"
    if isinstance(node, ast.IfExp):
        return _read_text(node.body)
    return ""


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| {_escape(left)} | {_escape(right)} |" for left, right in rows]
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Formats a text for a table cell: only `code` is marked up."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*_])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)
