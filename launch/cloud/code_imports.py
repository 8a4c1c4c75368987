"""The modules that a config imports, itself and through the files beside it, found in the code."""

import ast
import dataclasses
import sys
from collections.abc import Iterator

from tftpu.errors import UserError


@dataclasses.dataclass(frozen=True)
class Import:
    """The first import of a module that is not in the folder.

    Attributes:
        module: its top-level name, such as "pandas".
        file: path in the folder of the file that imports it.
        line: the line there.
    """

    module: str
    file: str
    line: int


def outside(files: dict[str, bytes], start: str) -> list[Import]:
    """Returns what a file imports from outside its folder; see `reached`."""
    return reached(files, start)[1]


def reached(files: dict[str, bytes], start: str) -> tuple[set[str], list[Import]]:
    """Returns the top-level modules of the folder that a file imports, and what it imports else.

    An import that may fail, in a `try` with an `except ImportError`, does not count, nor does one
    for type checkers alone, nor the standard library.

    Args:
        files: content of the folder's files, by path.
        start: path of the first file; those that it imports from the folder follow.

    Raises:
        UserError: a file is not valid Python.
    """
    within, found = {start.removesuffix(".py")}, dict[str, Import]()
    seen, waiting = set(), [start]
    while waiting:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for module, line in _imports(file, files[file]):
            inside = _inside(files, module)
            waiting += inside
            if inside:
                within.add(module)
            elif module not in sys.stdlib_module_names:
                found.setdefault(module, Import(module, file, line))
    return within, list(found.values())


def _inside(files: dict[str, bytes], module: str) -> list[str]:
    """Returns the files of a top-level module of the folder: its own, or all of a package."""
    if f"{module}.py" in files:
        return [f"{module}.py"]
    return [name for name in files if name.startswith(f"{module}/") and name.endswith(".py")]


def _imports(file: str, text: bytes) -> Iterator[tuple[str, int]]:
    """Yields the top-level module and the line of each import of a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{file}{line} is not valid Python: {error}") from error
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0], node.lineno
        waiting += _needed(node)


def _needed(node: ast.AST) -> list[ast.AST]:
    """Returns the children of a node, without imports that may fail or that never run."""
    if isinstance(node, ast.Try) and any(_catches_import_errors(h) for h in node.handlers):
        return [*node.orelse, *node.finalbody]
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return list(node.orelse)
    return list(ast.iter_child_nodes(node))


def _catches_import_errors(handler: ast.ExceptHandler) -> bool:
    caught = "BaseException" if handler.type is None else ast.unparse(handler.type)
    names = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
    return any(name in caught for name in names)
