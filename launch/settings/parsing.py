"""Parses command-line arguments into the options of a command, with absl.

`--name=value` and `--name value` mean the same, as does `value` for the flag declared as `word`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from absl import flags as absl_flags

from tftpu.amounts import format_period, parse_period
from tftpu.config import (
    ClusterConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    read_fields,
)
from tftpu.errors import UserError, did_you_mean, find_nearest
from tftpu.input_pipelines import addresses
from tftpu.launch.correction import ADAPTERS, FIELDS, KINDS, WORKDIRS
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.config_values import describe_kind
from tftpu.launch.settings.options import (
    ADDRESS,
    FOLDERS,
    TIME,
    Flag,
    Options,
    list_flags,
    takes_config,
)
from tftpu.storage import files

HELP = ("-h", "--help", "-help", "--helpfull")
OVERRIDE = "config."  # prefix of an override's name, as in --config.train.steps
_GROUPS = {
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "model": ModelConfig,
    "cluster": ClusterConfig,
}
_DEFINE = {
    bool: absl_flags.DEFINE_boolean,
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    str: absl_flags.DEFINE_string,
}
_PERIOD = "a time such as 30s, 5m, 2h or 7d"
AnyOptions = TypeVar("AnyOptions", bound=Options)


class Incomplete(UserError):  # noqa: N818 (named after the command line)
    """A command line that lacks a required flag."""


def parse(command: str, options: type[AnyOptions], words: Sequence[str]) -> AnyOptions:
    """Parses the arguments after the command's name on the command line.

    Args:
        command: the name of the command, for error messages.
        options: the class of the returned options.
        words: the arguments to parse.

    Raises:
        Incomplete: a required flag is missing.
        UserError: there is an unknown flag, a value of the wrong type, or a superfluous argument.
    """
    flags = {flag.name: flag for flag in list_flags(options)}
    named, overrides, alone = _split(command, flags, words, takes_config(options))
    named += _name_words(command, flags, named, alone)
    values: dict[str, Any] = _parse_by_absl(flags, named)
    if overrides:
        if not takes_config(options):
            raise UserError(
                f"tftpu {command} takes no --config: it uses the config of the workdir."
            )
        values["overrides"] = tuple(overrides)
    missing = [flag for flag in flags.values() if flag.required and not values[flag.name]]
    if missing:
        wanted = " and ".join(f"{flag.usage} ({flag.help})" for flag in missing)
        hints = " ".join(filter(None, (flag.hint() for flag in missing)))
        raise Incomplete(f"tftpu {command} needs {wanted}.{f' {hints}' if hints else ''}")
    return options(**values)


def to_argv(options: Options) -> list[str]:
    """Returns the arguments that `parse` turns into these options; defaults are left out."""
    words = []
    for flag in list_flags(type(options)):
        value = getattr(options, flag.name)
        if value != flag.default or flag.required:
            shown = str(value).lower() if flag.kind is bool else value
            words += [f"--{flag.name}={v}" for v in (value if flag.several else [shown])]
    return [*words, *getattr(options, "overrides", ())]


def _split(
    command: str, flags: Mapping[str, Flag], words: Sequence[str], overridable: bool
) -> tuple[list[str], list[str], list[str]]:
    """Splits arguments into flags, overrides (both as --name=value) and positional arguments."""
    named, overrides, alone = [], [], []
    names = {**flags} | {alias: flag for flag in flags.values() for alias in flag.aliases}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return named, overrides, [*alone, *rest]
        if not word.startswith("-") or word == "-":
            alone.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        is_override = name.startswith(OVERRIDE)
        flag = names.get(name) or _find_negated(flags, name)
        if not is_override and flag is None:
            configs = [w.partition("=")[2] for w in named if w.startswith("--config=")]
            if not any(one.word and one.name == "workdir" for one in flags.values()):
                configs = [*alone, *configs, ""]  # the config may be the argument CONFIG
            config = configs[0] if overridable and configs else None
            near = _suggest(name, [*flags], [*names], config)
            sources = [flag.name for flag in flags.values() if flag.metavar == ADDRESS]
            if sources and value and name in KINDS:
                near = f" Did you mean '--{sources[0]}={name}:{value}'?"
            raise UserError(
                f"tftpu {command} has no flag --{name} (tftpu {command} --help lists its "
                f"flags).{near}"
            )
        if not equals and not (flag and flag.kind is bool):
            if not rest or (rest[0].startswith("-") and not _is_number(rest[0])):
                usage = f"--{name}={flag.metavar} ({flag.help})" if flag else f"--{name}=VALUE"
                raise UserError(f"--{name} has no value: write {usage}.")
            equals, value = "=", rest.pop(0)
        is_text = flag is not None and flag.metavar == "TEXT"  # may be empty: commands check that
        if equals and not value and not is_override and not is_text:
            raise UserError(f"--{name} has no value: write --{name}=VALUE, or leave it out.")
        if flag is not None and name in flag.aliases:
            name = flag.name
        (overrides if is_override else named).append(f"--{name}{equals}{value}")
    return named, overrides, alone


def _suggest(name: str, flags: Sequence[str], known: Sequence[str], config: str | None) -> str:
    """Returns a suggestion of the flag, or the field of a config, that is nearest to a name.

    Args:
        name: the unknown name of a flag.
        flags: the names of the flags.
        known: the names and the aliases of the flags.
        config: the name of the config, "" if it is unknown; None: the command takes no config.
    """
    near = find_nearest(name, known)
    if name in WORKDIRS and "workdir" in flags and near != "output":
        near = "workdir"
    if name in ADAPTERS and "base" in flags:  # meant as --base, which leaves adapters out
        near = "base"
    if config is not None:
        fields = list_config_fields(config) | FIELDS
        close = name if name in fields else None if near else find_nearest(name, fields)
        near = f"{OVERRIDE}{fields[close]}" if close else near
        if name.split(".")[0] in _GROUPS:  # such as --train.steps, which lacks "config."
            near = f"{OVERRIDE}{name}"
    return f" Did you mean '--{near}'?" if near else did_you_mean(name, flags)


def list_config_fields(config: str) -> dict[str, str]:
    """Returns paths such as "train.steps" by field name; for a user's config, only common ones."""
    if config in config_flags.list_names():
        return config_flags.list_fields(config_flags.load(config, []))
    return {f: f"{g}.{f}" for g, kind in reversed(_GROUPS.items()) for f in read_fields(kind)}


def _name_words(
    command: str, flags: Mapping[str, Flag], named: Sequence[str], alone: Sequence[str]
) -> list[str]:
    """Returns positional arguments as `--name=value`."""
    if not alone:
        return []
    flag = next((flag for flag in flags.values() if flag.word), None)
    if flag is None:
        raise UserError(
            f"tftpu {command} takes only flags such as --flag=value, not {alone[-1]!r}."
        )
    if flag.several:
        return [f"--{flag.name}={word}" for word in alone]
    given = [word.partition("=")[2] for word in named if word.startswith(f"--{flag.name}=")]
    if len(alone) + len(given) > 1:
        names = {word.partition("=")[0].lstrip("-") for word in named}
        missing = [f.name for f in flags.values() if f.required and not f.word]
        missing = [name for name in missing if name not in names]
        value = alone[-1]
        if missing and flags[missing[0]].metavar == ADDRESS and os.path.isdir(value):
            value = addresses.address_of(value)
        hint = f" Did you mean '--{missing[0]}={value}'?" if missing else ""
        if flag.metavar == "RUN" and given and alone[0].endswith(".py"):
            hint = f" A run knows its config. Type: tftpu {command} {given[0]}"
        raise UserError(
            f"tftpu {command} takes one {flag.metavar}, but {len(alone) + len(given)} are given: "
            f"{', '.join(map(repr, [*given, *alone]))}.{hint}"
        )
    return [f"--{flag.name}={alone[0]}"]


def _find_negated(flags: Mapping[str, Flag], name: str) -> Flag | None:
    """Returns the flag that `--noNAME` sets to false; None if there is none."""
    flag = flags.get(name.removeprefix("no"))
    return flag if flag is not None and flag.kind is bool else None


def _parse_by_absl(flags: Mapping[str, Flag], words: list[str]) -> dict[str, Any]:
    """Returns the values of all flags, parsed with absl from `--name=value` arguments."""
    values = absl_flags.FlagValues()
    for flag in flags.values():
        define: Any = absl_flags.DEFINE_multi_string if flag.several else _DEFINE[flag.kind]
        default = list(flag.default) if flag.several and flag.default else flag.default
        limits = {"lower_bound": flag.minimum} if flag.kind in (int, float) else {}
        define(flag.name, default, flag.help, flag_values=values, **limits)
    for word in words:
        flag = flags[_resolve_name(flags, word)]
        try:
            values(["tftpu", _in_seconds(word) if flag.metavar == TIME else word])
            if flag.kind is float and not math.isfinite(values[flag.name].value or 0):
                raise absl_flags.IllegalFlagValueError
        except (absl_flags.Error, ValueError) as error:
            least, expected = "", describe_kind(flag.kind)
            if flag.metavar == TIME:
                expected = _PERIOD
            if flag.minimum is not None:
                shown = format_period if flag.metavar == TIME else "{:g}".format
                least = f" of {shown(flag.minimum)} or more"
            raise UserError(f"{word}: the value must be {expected}{least}.") from error
        if flag.metavar in FOLDERS and not flag.several:
            files.check_folder(f"--{flag.name}", str(values[flag.name].value))
    found = {name: values[name].value for name in flags}
    return {name: tuple(v or ()) if flags[name].several else v for name, v in found.items()}


def _in_seconds(word: str) -> str:
    name, _, text = word.partition("=")
    return f"{name}={parse_period(text)}"


def _resolve_name(flags: Mapping[str, Flag], word: str) -> str:
    name = word.lstrip("-").partition("=")[0]
    return name if name in flags else name.removeprefix("no")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
