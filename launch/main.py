"""The command line: `tftpu COMMAND WORD --flag=value`.

A command is a file of `launch/commands/`; CONTRIBUTING.md describes how to write one. This module
finds the file, parses its flags and runs it.
"""

import dataclasses
import gc
import importlib
import importlib.util
import inspect
import os
import pkgutil
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tftpu.engines.backend import OtherBackend
from tftpu.errors import UserError, did_you_mean
from tftpu.launch import commands as package
from tftpu.launch import completion, correction, interrupts, output
from tftpu.launch.failures import run_for_exit_code
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.options import ConfigOptions, Flag, Options, list_flags, takes_config
from tftpu.launch.settings.parsing import HELP, Incomplete, parse
from tftpu.launch.startup import build_command
from tftpu.observe import logs
from tftpu.version import __version__

_AGAIN = "TFTPU_STARTED_AGAIN"  # environment variable that `_start_again` sets
_WIDTH = 100
_RUNS = 2  # maximum number of runs in a command line that `_complete` returns
_CORRECTIONS = 3  # maximum number of mistakes that are corrected in one command line


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        name: the words after `tftpu`, such as "train" or "data check".
        summary: one-line description of the command.
        description: further paragraphs of the help; "" if there are none.
        example: one or more command lines, separated by newlines.
        options: the dataclass that `run` takes.
        run: the function that runs the command; raises `UserError` for the user's mistakes.
    """

    name: str
    summary: str
    description: str
    example: str
    options: type[Options]
    run: Callable[[Any], None]

    @property
    def flags(self) -> tuple[Flag, ...]:
        """The flags. If one may be given as a positional argument, it is the first."""
        return list_flags(self.options)

    @property
    def overrides_help(self) -> str:
        """The help of `--config.GROUP.FIELD=VALUE`; "" if the command does not take this flag."""
        return self.options.OVERRIDES_HELP if takes_config(self.options) else ""

    @property
    def usage(self) -> str:
        """The first line of the help, without "usage: "."""
        needed = [f.usage for f in self.flags if f.required]
        shown = [flag.usage if flag.required else f"[{flag.usage}]" for flag in self.flags[:1]]
        words = shown if self.flags and self.flags[0].word else []
        others = [usage for usage in needed if usage not in words]
        optional = len(words) + len(others) < len(self.flags)
        return " ".join(
            ["tftpu", self.name, *words, *others, *(["[--flag=value ...]"] if optional else [])]
        )

    def format_help(self) -> str:
        """Returns what `tftpu COMMAND --help` prints."""
        rows = [(flag.usage, _describe_flag(flag)) for flag in self.flags]
        if self.overrides_help:
            rows.append(("--config.GROUP.FIELD=VALUE", self.overrides_help))
        parts = [f"usage: {self.usage}", self.summary, self.description, _format_table(rows)]
        parts.append("example:\n" + textwrap.indent(self.example, "  "))
        return "\n\n".join(filter(None, parts))


def run() -> None:
    """Runs the command line of this process, and exits; called by the console script."""
    completion.answer(load_commands)
    output.outlive_readers()
    logs.set_up()
    is_again = os.environ.pop(_AGAIN, "")
    try:
        code = main(sys.argv[1:], None if is_again else _start_again)
    finally:
        interrupts.die_at_interrupt()
        gc.freeze()  # otherwise garbage collection at exit scans TensorFlow for a second or more
    sys.exit(code)


def _start_again(backend: str) -> None:
    """Replaces this process with one that runs the same command, with another Keras backend."""
    os.environ.update({"KERAS_BACKEND": backend, _AGAIN: "1"})
    sys.stdout.flush()
    command = build_command(sys.argv[1:])
    os.execv(command[0], command)


def main(arguments: Sequence[str], start_again: Callable[[str], None] | None = None) -> int:
    """Runs the command that the arguments name.

    Args:
        arguments: the words after `tftpu` on the command line.
        start_again: a function that runs the command in a new process with the given Keras backend;
            called if Keras is loaded with another one. None prints an error instead.

    Returns:
        The exit code.
    """
    logs.set_up()

    def work() -> None:
        try:
            _dispatch(list(arguments))
        except OtherBackend as error:
            if start_again is None:
                raise
            start_again(error.wanted)

    with interrupts.repeating_lost_interrupts():
        return run_for_exit_code(work)


def load_commands() -> dict[str, Command]:
    """Returns all commands by name, sorted. Imports every file of `commands/`, but runs none."""
    return {name: _load(name, module) for name, module in sorted(_find_modules().items())}


def group_commands() -> dict[str, dict[str, str]]:
    """Maps each group's title to {command: module}, sorted by command, with `train` first."""
    modules = dict(sorted(_find_modules().items(), key=lambda item: (item[0] != "train", item[0])))
    groups = {}
    for group in [*package.GROUPS, ""]:
        inside = f"{package.__name__}.{group}".removesuffix(".")
        title = _read_docstring(_find_source(inside)).partition(":")[0] if group else "Others"
        groups[title] = {n: m for n, m in modules.items() if m.startswith(f"{inside}.")}
        modules = {n: m for n, m in modules.items() if n not in groups[title]}
    return {title: members for title, members in groups.items() if members}


def format_usage(within: str = "") -> str:
    """Returns what `tftpu help` prints; imports no command.

    Args:
        within: the beginning of the commands to list, such as "launch"; "" lists all.
    """
    parts = [f"usage: tftpu {within or 'COMMAND'} [WORD ...] [--flag=value ...]"]
    for title, modules in group_commands().items():
        names = [name for name in modules if name.startswith(within)]
        if names:
            rows = [(name, _read_summary(modules[name])) for name in names]
            parts.append(f"{title}\n{_format_table(rows)}")
    parts.append(
        "  tftpu COMMAND --help        shows the words and flags of a command\n"
        "  tftpu train digits_resnet   is a good first one\n"
        "  tftpu init NAME             writes a project of your own"
    )
    return "\n\n".join(parts)


def _read_summary(module: str) -> str:
    return " ".join(_read_docstring(_find_source(module)).split("\n\n")[0].split())


def _dispatch(words: list[str]) -> None:
    if words and words[0] in ("version", "--version"):
        print(f"tftpu {__version__}")
        return
    if words[:1] == ["help"] and words[1:]:  # tftpu help COMMAND
        words = [*words[1:], "--help"]
    if not words or words[0] in ("help", *HELP):
        print(format_usage())
        return
    is_help = all(word in HELP for word in words[1:])
    if is_help and any(name.startswith(f"{words[0]} ") for name in _find_modules()):
        print(format_usage(words[0]))
        return
    try:
        _run(*_split_command(words))
    except UserError as error:
        line = _correct(words, str(error))
        if line and not hasattr(error, "__notes__"):
            error.add_note(f"Type: {line}")
        raise


def _run(name: str, arguments: list[str]) -> None:
    """Runs a command, or prints its help."""
    command = _load(name, _find_modules()[name])
    if any(word in HELP for word in arguments):
        print(command.format_help())
        return
    try:
        options = parse(name, command.options, arguments)
    except Incomplete as error:
        error.add_note(f"For example: {_complete(command, arguments)}")
        raise
    try:
        command.run(options)
    except UserError as error:
        if not (takes_config(type(options)) and getattr(options, "config", None)):
            error.args = (correction.leave_fields_out(str(error)), *error.args[1:])
        raise


def _complete(command: Command, arguments: list[str]) -> str:
    """Returns a command line of the given arguments, completed from the most similar example.

    If the arguments name no run, the newest runs in the folder `runs` replace the example's. For
    `train`, the config of the run in --workdir replaces the example's.
    """
    name, examples = command.name, command.example.splitlines()
    lines = [shlex.split(line.removeprefix(f"tftpu {name}")) for line in examples]
    words = max(lines, key=lambda line: len({*line} & {*arguments}))
    first = [] if words[0].startswith("-") else words[:1]
    if arguments and not arguments[0].startswith("-"):
        first, arguments = arguments[:1], arguments[1:]
    elif first and command.flags[0].metavar == "RUN":
        most = _RUNS if command.flags[0].several else 1
        first = correction.list_runs("runs")[:most] or first
    run = next((w.partition("=")[2] for w in arguments if w.startswith("--workdir=")), "")
    if name == "train" and os.path.isfile(os.path.join(run, "goodput.json")):
        first = [config_flags.find_config_of_run(run) or "CONFIG"]
    given = {word.split("=")[0] for word in arguments}
    flags = [w for w in words if w.startswith("-") and w.split("=")[0] not in given]
    return f"tftpu {name} {shlex.join([*first, *arguments, *flags])}"


def _correct(words: list[str], message: str) -> str:
    """Returns a corrected command line that could run; "" if none is found."""
    for _ in range(_CORRECTIONS):
        words = correction.correct(words, message)
        if not words:
            return ""
        try:
            name, arguments = _split_command(words)
            command = _load(name, _find_modules()[name])
            given = [word for word in arguments if word not in HELP]
            try:
                parsed = parse(name, command.options, given)
            except Incomplete:
                asks_for_help = len(given) < len(arguments)
                completed = _complete(command, given)
                return shlex.join(["tftpu", *words]) if asks_for_help else completed
            if isinstance(parsed, ConfigOptions) and parsed.config:
                parsed.load_experiment()
            return shlex.join(["tftpu", *words])
        except UserError as error:
            message = str(error)
    return ""


def _split_command(words: list[str]) -> tuple[str, list[str]]:
    """Splits a command line into the name of the command and its arguments."""
    names = list(_find_modules())
    if " ".join(words[:2]) in names:
        return " ".join(words[:2]), words[2:]
    if words[0] in names:
        return words[0], words[1:]
    group = [name.split()[1] for name in names if name.startswith(f"{words[0]} ")]
    if group:
        raise UserError(
            f"There is no command '{words[0]} {words[1]}'.{did_you_mean(words[1], group)}"
        )
    meant = correction.SYNONYMS.get(words[0])
    if words[0].endswith(".py") or words[0] in config_flags.list_names():
        raise UserError(f"{words[0]!r} is a config. Did you mean 'train {words[0]}'?")
    near = f" Did you mean {meant!r}?" if meant else did_you_mean(words[0], names)
    raise UserError(f"There is no command {words[0]!r}.{near}")


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
    with interrupts.ending_at_interrupt():
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
    """Returns the docstring in a module's file; `python -OO` removes it from imported modules."""
    return path.read_text().split('"""', 2)[1].strip()


def _describe_flag(flag: Flag) -> str:
    text = f"{flag.help}; or --{flag.name}={flag.metavar}" if flag.word else flag.help
    if flag.required:
        return text if flag.word else f"{text} (required)"
    return f"{text} (default: {flag.shown})" if flag.shown else text


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
