"""The import graph of the product, lazy imports included."""

import ast
import os
from functools import cache
from pathlib import Path

from tests.support.repository.checkout import ROOT


@cache
def modules() -> dict[str, Path]:
    """Returns the file of every module of the product, by its name."""
    found = {}
    for folder, _, names in sorted(os.walk(ROOT / "tftpu", followlinks=True)):
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def names_imported(path: Path, typing: bool = False) -> set[str]:
    """Returns all names that a file imports, lazily too.

    Args:
        path: of the file.
        typing: whether to include imports under `if TYPE_CHECKING`.
    """
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not typing:
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return names


def module_of(name: str) -> str | None:
    """Returns the product's module that an imported name is, or is defined in."""
    while name:
        if name in modules():
            return name
        name = name.rpartition(".")[0]
    return None


@cache
def graph() -> dict[str, frozenset[str]]:
    """Returns the modules that each module imports."""
    edges = {}
    for name, path in modules().items():
        found = {module_of(imported) for imported in names_imported(path)}
        edges[name] = frozenset(m for m in found if m is not None and m != name)
    return edges


def circles() -> list[list[str]]:
    """Returns the strongly connected components of the import graph (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph()[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == node:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph():
        if node not in index:
            visit(node)
    return found
