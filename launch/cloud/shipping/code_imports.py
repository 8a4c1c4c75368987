"""Finds the modules that a config imports, directly or through the files beside it."""

import ast
import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from tftpu.errors import UserError


@dataclasses.dataclass(frozen=True)
class ExternalImport:
    """The first import of a module that is not in the config's folder.

    Attributes:
        module: its top-level name, such as "pandas".
        file: path in the folder of the file that imports it.
        line: line number of the import in that file.
    """

    module: str
    file: str
    line: int


def find_external(files: dict[str, bytes], start: str) -> list[ExternalImport]:
    """Returns the modules outside a folder that a file in it imports, directly or through others.

    Left out are the standard library, imports for type checkers only, and imports that may fail (in
    a `try` with an `except ImportError`).

    Args:
        files: content of the folder's files, by path.
        start: path of the first file; files of the folder that it imports are searched, too.

    Raises:
        UserError: an imported file is not valid Python. Files that are not imported may be
            invalid.
    """
    found, broken = dict[str, ExternalImport](), dict[str, Exception]()
    named, seen, waiting = set[str](), set(), [start]
    while waiting:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(files[file])
        except (SyntaxError, ValueError) as error:
            broken[file] = error
            continue
        named.update(_iterate_imported_names(tree, file.rpartition("/")[0].replace("/", ".")))
        for module, line in _iterate_imports(tree):
            inside = _list_module_files(files, module)
            waiting += inside
            if not inside and module not in sys.stdlib_module_names:
                found.setdefault(module, ExternalImport(module, file, line))
    for file, error in broken.items():
        # A broken file that is not imported may be a template.
        if file == start or _to_module(file) in named:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UserError(f"{file}{line} is not valid Python: {error}") from error
    return list(found.values())


def _to_module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def trace_modules(folder: Path, start: str) -> tuple[set[str], set[str], set[str]]:
    """Returns a module and its imports in a folder, its other imports, and all names in the code.

    All import statements count, also those in functions, except those for type checkers. Only
    imported files are read, and invalid Python counts as importing nothing. The names are those of
    variables, of attributes and in imports, in the code of the modules in the folder.

    Args:
        folder: the folder of the module.
        start: name of the module; modules of the folder that it imports are searched, too.
    """
    within, others, names, waiting = set(), set(), set(), [start]
    while waiting:
        module = waiting.pop()
        file = _find_file(folder, module)
        # `tftpu` is the installed package, even if the folder is a clone of tftpu.
        if file is None or module.partition(".")[0] == "tftpu":
            others.add(module)
        elif module not in within:
            within.add(module)
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
                tree = ast.parse(file.read_bytes())
                waiting += _iterate_imported_names(tree, package)
                names.update(_iterate_identifiers(tree))
    return within, others, names


def _iterate_identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")


def _find_file(folder: Path, module: str) -> Path | None:
    place = folder.joinpath(*module.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _iterate_imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Yields the dotted names that code imports, and their parents; not all are modules."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # a relative import outside of a package
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names = [f"{base}.{alias.name}" for alias in node.names]
        parts = [name.split(".") for name in names]
        yield from (".".join(part[:end]) for part in parts for end in range(1, len(part) + 1))
        waiting += _list_executed_children(node)


def _list_module_files(files: dict[str, bytes], module: str) -> list[str]:
    """Returns the files of a top-level module: one file, or all files of a package."""
    if f"{module}.py" in files:
        return [f"{module}.py"]
    return [name for name in files if name.startswith(f"{module}/") and name.endswith(".py")]


def _iterate_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the top-level module and the line of each absolute import that a file requires."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0], node.lineno
        waiting += _list_required_children(node)


def _list_required_children(node: ast.AST) -> list[ast.AST]:
    """Returns a node's children, without code for type checkers and imports that may fail."""
    if isinstance(node, ast.Try) and any(_is_import_error_handler(h) for h in node.handlers):
        return [*node.orelse, *node.finalbody]
    return _list_executed_children(node)


def _list_executed_children(node: ast.AST) -> list[ast.AST]:
    """Returns a node's children, without code for type checkers, which never runs."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return list(node.orelse)
    return list(ast.iter_child_nodes(node))


def _is_import_error_handler(handler: ast.ExceptHandler) -> bool:
    caught = "BaseException" if handler.type is None else ast.unparse(handler.type)
    names = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
    return any(name in caught for name in names)
