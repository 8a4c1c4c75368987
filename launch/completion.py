"""Completes words in a shell: commands, flags, configs, fields of a config, runs and slices.

The shell asks this program for them, by the protocol of argcomplete:

    eval "$(register-python-argcomplete tftpu)"
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tftpu.errors import UserError

if TYPE_CHECKING:
    from tftpu.launch.main import Command


def answer(load: "Callable[[], dict[str, Command]]") -> None:
    """Prints the completions and exits, if a shell requests them; otherwise returns.

    Args:
        load: a function that returns the commands by name.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:  # the shell may have found argcomplete in another environment
        return
    argcomplete.autocomplete(_build_parser(load()), always_complete_options="long")


def _build_parser(commands: "dict[str, Command]") -> argparse.ArgumentParser:
    """Returns a parser with the names and flags of all commands, used only for completion."""
    parser = argparse.ArgumentParser(prog="tftpu", add_help=False)
    groups = {"": parser.add_subparsers()}
    for name, command in commands.items():
        first, _, second = name.rpartition(" ")
        if first not in groups:
            groups[first] = groups[""].add_parser(first, add_help=False).add_subparsers()
        one = groups[first].add_parser(second, add_help=False)
        for flag in command.flags:
            complete = _COMPLETERS.get(flag.metavar.removesuffix(",..."), _suggest_nothing)
            for label in [f"--{flag.name}", *([flag.name] if flag.word else [])]:
                kind: dict[str, Any] = {"nargs": "*"} if label == flag.name else {}
                if flag.kind is bool:
                    kind = {"action": "store_true"}
                added: Any = one.add_argument(label, **kind)
                if flag.kind is not bool:
                    added.completer = complete
        if command.overrides_help:
            for field in _list_fields():
                one.add_argument(f"--config.{field}")
    return parser


def _list_fields() -> Iterator[str]:
    """Yields the fields of the config in the line typed so far, or those that all configs have."""
    from tftpu.launch.settings import parsing

    words = [word.partition("=")[2] or word for word in os.environ.get("COMP_LINE", "").split()]
    known = _suggest_configs("")
    try:
        fields = parsing.list_config_fields(next((word for word in words if word in known), ""))
    except UserError:
        fields = parsing.list_config_fields("")
    yield from fields.values()


def _suggest_configs(prefix: str, **_: Any) -> Sequence[str]:
    from tftpu.launch.settings import config_flags

    return [*config_flags.list_names(), *(path.name for path in Path().glob("*.py"))]


def _suggest_runs(prefix: str, **_: Any) -> Sequence[str]:
    around = Path(os.path.dirname(prefix) or "runs")
    return [str(path) for path in around.glob("*") if path.is_dir()] if around.is_dir() else []


def _suggest_slices(prefix: str, **_: Any) -> Sequence[str]:
    from tftpu.tpu import slices

    before = prefix.rpartition(",")[0]
    return [f"{before},{name}" if before else name for name in slices.list_names()]


def _suggest_nothing(prefix: str, **_: Any) -> Sequence[str]:
    return []


_COMPLETERS = {"CONFIG": _suggest_configs, "RUN": _suggest_runs, "SLICE": _suggest_slices}
