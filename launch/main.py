"""The command line: `tftpu COMMAND --flag=value`.

A command is a file of `launch/commands/`; CONTRIBUTING.md describes how to write one. This module
finds the file, parses its flags and runs it.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tftpu.errors import UserError, did_you_mean
from tftpu.launch import commands as package
from tftpu.launch import output
from tftpu.launch.failures import run_for_exit_code
from tftpu.launch.settings.options import HELP, Flag, Options, list_flags, parse, takes_config
from tftpu.observe import logs
from tftpu.version import __version__

_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        name: the words after `tftpu`, such as "train" or "data check".
        summary: one line.
        description: further paragraphs of its help, "" if there are none.
        example: one or more command lines.
        options: the dataclass that `run` takes.
        run: does the work; raises `UserError` for the user's mistakes.
    """

    name: str
    summary: str
    description: str
    example: str
    options: type[Options]
    run: Callable[[Any], None]

    @property
    def flags(self) -> tuple[Flag, ...]:
        """The flags, and the positional argument if there is one."""
        return list_flags(self.options)

    @property
    def takes_config(self) -> bool:
        """True if `--config.GROUP.FIELD=VALUE` is allowed."""
        return takes_config(self.options)

    @property
    def usage(self) -> str:
        """The first line of the help."""
        needed = [f.usage for f in self.flags if f.required and not f.positional]
        words = [f.usage for f in self.flags if f.positional]
        optional = len(needed) + len(words) < len(self.flags)
        return " ".join(
            ["tftpu", self.name, *words, *needed, *(["[--flag=value ...]"] if optional else [])]
        )

    def format_help(self) -> str:
        """Returns what `tftpu COMMAND --help` prints."""
        rows = [(flag.usage, _describe_flag(flag)) for flag in self.flags]
        if self.takes_config:
            text = "any field of the config, such as --config.train.steps=500"
            rows.append(("--config.GROUP.FIELD=VALUE", text))
        parts = [f"usage: {self.usage}", self.summary, self.description, _format_table(rows)]
        parts.append("example:\n" + textwrap.indent(self.example, "  "))
        return "\n\n".join(filter(None, parts))


def run() -> None:
    """Runs the command line of this process, and exits; the console script."""
    output.outlive_readers()
    logs.set_up()
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Runs a command.

    Args:
        arguments: the words after `tftpu` on the command line.

    Returns:
        The exit code.
    """
    logs.set_up()
    return run_for_exit_code(lambda: _dispatch(list(arguments)))


def load_commands() -> dict[str, Command]:
    """Returns all commands by name, sorted. Imports every file of `commands/`, but runs none."""
    return {name: _load(name, module) for name, module in sorted(_find_modules().items())}


def format_usage() -> str:
    """Returns what `tftpu help` prints; imports no command."""
    rows = []
    for name, module in sorted(_find_modules().items()):
        rows.append((name, _read_docstring(_find_source(module)).splitlines()[0]))
    return "\n".join(
        [
            "usage: tftpu COMMAND [--flag=value ...]",
            "",
            _format_table(rows),
            "",
            "  tftpu COMMAND --help                 shows the flags of a command",
            "  tftpu train --config=digits_resnet   is a good first one",
            "  tftpu init NAME                      writes a project of your own",
        ]
    )


def _dispatch(words: list[str]) -> None:
    if words and words[0] in ("version", "--version"):
        print(f"tftpu {__version__}")
        return
    if words[:1] == ["help"] and words[1:]:  # tftpu help COMMAND
        words = [*words[1:], "--help"]
    if not words or words[0] in ("help", *HELP):
        print(format_usage())
        return
    name, arguments = _split_command(words)
    command = _load(name, _find_modules()[name])
    if any(word in HELP for word in arguments):
        print(command.format_help())
        return
    command.run(parse(name, command.options, arguments))


def _split_command(words: list[str]) -> tuple[str, list[str]]:
    """Splits the words into the name of a command and its arguments."""
    names = list(_find_modules())
    if " ".join(words[:2]) in names:
        return " ".join(words[:2]), words[2:]
    if words[0] in names:
        return words[0], words[1:]
    group = [name.split()[1] for name in names if name.startswith(f"{words[0]} ")]
    if not group:
        raise UserError(f"There is no command {words[0]!r}.{did_you_mean(words[0], names)}")
    if len(words) == 1 or words[1].startswith("-"):
        raise UserError(f"tftpu {words[0]} must be followed by one of {', '.join(group)}.")
    raise UserError(f"There is no command '{words[0]} {words[1]}'.{did_you_mean(words[1], group)}")


def _find_modules() -> dict[str, str]:
    """Maps each command to its module: `commands/data/check.py` is "data check"."""
    found = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not info.ispkg:
            words = info.name.removeprefix(f"{package.__name__}.").split(".")
            words = [word for word in words if word not in package.WORDLESS]
            found[" ".join(words).replace("_", "-")] = info.name
    return found


def _load(name: str, module: str) -> Command:
    code = importlib.import_module(module)
    text = _read_docstring(Path(inspect.getfile(code)))
    summary, *paragraphs = text.split("\n\n")
    # An example is indented. Formatters remove the indent if nothing but the example follows the
    # summary.
    examples = [p for p in paragraphs if p.startswith(("    ", "tftpu "))]
    return Command(
        name=name,
        summary=" ".join(summary.split()),
        description="\n\n".join(p for p in paragraphs if p not in examples),
        example="\n".join(textwrap.dedent(p) for p in examples),
        options=code.Options,
        run=code.run,
    )


def _find_source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    return Path(spec.origin)


def _read_docstring(path: Path) -> str:
    """Returns the docstring of a file, which `python -OO` removes from the module."""
    return path.read_text().split('"""', 2)[1].strip()


def _describe_flag(flag: Flag) -> str:
    if flag.required:
        return flag.help if flag.positional else f"{flag.help} (required)"
    return f"{flag.help} (default: {flag.shown})" if flag.shown else flag.help


def _format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Formats rows of two columns; the second is wrapped."""
    width = 2 + min(30, max((len(first) for first, _ in rows), default=0))
    lines = []
    for first, second in rows:
        head = f"  {first:{width}}"
        if len(first) > width - 2:  # too long for its column: the text starts on the next line
            lines.append(f"  {first}")
            head = " " * (width + 2)
        lines += textwrap.wrap(
            second, _WIDTH, initial_indent=head, subsequent_indent=" " * (width + 2)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run()
