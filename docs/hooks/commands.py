"""Writes the command reference and the tables of config fields while the site is built.

A page requests them with a separate line: `{{ commands }}`, `{{ fields tftpu.config.TrainConfig }}`
or `{{ classes tftpu.models.sizes tftpu.config.ModelConfig }}`. The last one writes what each class
of a module adds to the class that it derives from.
"""

import dataclasses
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterable
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """A flag, or the positional argument, as the reference shows it."""

    usage: str
    default: str
    help: str


class Entry(NamedTuple):
    """A command as the reference shows it, and the title of its group."""

    group: str
    name: str
    summary: str
    description: str
    example: str
    flags: tuple[Flag, ...]
    overrides_help: str


def entries() -> list[Entry]:
    """Returns the commands of `tftpu` in the order of its help, read from the command table.

    Only this function depends on how `tftpu.launch.main` describes a command.
    """
    from tftpu.launch import main

    commands = main.load_commands()
    ordered = [(group, name) for group, names in main.group_commands().items() for name in names]
    return [
        Entry(
            group,
            name,
            command.summary,
            command.description,
            command.example,
            tuple(
                Flag(flag.usage, "required" if flag.required else flag.shown, flag.help)
                for flag in command.flags
            ),
            command.overrides_help,
        )
        for group, name in ordered
        for command in [commands[name]]
    ]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replaces the lines `{{ … }}` of a page."""
    markdown = re.sub(r"^\{\{ commands \}\}$", lambda _: reference(entries()), markdown, flags=re.M)
    found = re.compile(r"^\{\{ classes (\S+) (\S+) \}\}$", re.M)
    markdown = found.sub(lambda m: classes(m[1], m[2]), markdown)
    return re.sub(r"^\{\{ fields (\S+) \}\}$", lambda m: fields(m[1]), markdown, flags=re.M)


def reference(commands: Iterable[Entry]) -> str:
    """Returns the command reference as Markdown: a section and a table of flags for each."""
    text, group = [], ""
    for command in commands:
        if command.group != group:
            group = command.group
            text += [f"## {group}", ""]
        text += [f"### tftpu {command.name}", "", _cell(command.summary), ""]
        text += [_escaped(command.description), ""]
        if command.example:
            text += ["```bash", command.example, "```", ""]
        rows = [
            (f"`{flag.usage}`", _escaped(flag.default), _cell(flag.help)) for flag in command.flags
        ]
        if command.overrides_help:
            meaning = f"{_cell(command.overrides_help)}. See [Config fields](config.md)."
            rows.append(("`--config.GROUP.FIELD=VALUE`", "", meaning))
        if not rows:
            continue
        text += [_table(("flag", "default", "meaning"), rows), ""]
    return "\n".join(text)


def classes(module: str, base: str) -> str:
    """Returns a section with the own fields of each class of a module, by name, as Markdown.

    Args:
        module: that defines or imports the classes.
        base: path of the class that they derive from, whose fields are left out where the default
            is the same; a class that others derive from is left out.
    """
    parent = _import_class(base)
    found = {
        name: cls
        for name, cls in sorted(vars(importlib.import_module(module)).items())
        if isinstance(cls, type) and issubclass(cls, parent)
    }
    bases = {above for cls in found.values() for above in cls.__mro__[1:]}
    names = [name for name, cls in found.items() if cls not in bases]
    return "\n\n".join(f"### {name}\n\n{fields(f'{module}.{name}', base)}" for name in names)


def _import_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def fields(path: str, base: str = "") -> str:
    """Returns the fields of a dataclass as a Markdown table, in the order of their declaration.

    Args:
        path: of the class, as "tftpu.config.TrainConfig".
        base: path of a class whose rows are left out; "" leaves none out.
    """
    known = _rows(_import_class(base)) if base else []
    rows = [row for row in _rows(_import_class(path)) if row not in known]
    return _table(("field", "type", "default", "meaning"), rows)


def _rows(cls: type) -> list[tuple[str, ...]]:
    meanings = _meanings(cls)
    rows = []
    for field in dataclasses.fields(cls):
        kind = field.type if isinstance(field.type, str) else _type_name(field.type)
        rows.append(
            (f"`{field.name}`", f"`{kind}`", _value(field), _cell(meanings.get(field.name, "")))
        )
    return rows


def _meanings(cls: type) -> dict[str, str]:
    """Returns each field's description, from the docstring's Attributes or Args, or a comment."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        if dataclasses.is_dataclass(base):
            found |= _comments(inspect.getsource(base))
            found |= _documented(inspect.getdoc(base) or "")
    return found


def _documented(docstring: str) -> dict[str, str]:
    section = re.search(r"^(?:Attributes|Args):\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.M)
    found: dict[str, str] = {}
    for names, text in re.findall(
        r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M
    ):
        found |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return found


def _comments(source: str) -> dict[str, str]:
    """Returns the comments at the end of, or right above, the lines that declare fields."""
    lines, found, above = source.splitlines(), {}, []
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline)
        if token.type == tokenize.COMMENT
    }
    for number, line in enumerate(lines, 1):
        declared = re.match(r"    (\w+): ", line)
        if declared:
            said = [*above, comments.get(number, "")]
            found[declared[1]] = " ".join(part for part in said if part)
        above = [*above, comments[number]] if line.strip().startswith("#") else []
    return {name: text for name, text in found.items() if text}


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _value(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return _default(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return _default(field.default_factory()) if field.default_factory is not Any else ""
    return "required"


def _default(value: Any) -> str:
    if value is None or value == "" or value == ():
        return ""
    if dataclasses.is_dataclass(value):
        return "see below"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    """Formats a text for a table cell: one line, with only `code` marked up."""
    return _sentence(_escaped(" ".join(text.split())))


def _escaped(text: str) -> str:
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*_])", r"\\\1", p).replace("<", "&lt;") for p in parts[::2]]
    return "`".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
