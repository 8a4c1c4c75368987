"""The options of a command: the fields of a frozen dataclass, which absl parses as flags.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options(ConfigOptions):
        to: str = required("FILE", "file to write")
        workers: int = flag(0, "number of processes", minimum=0)
        folder: str = argument("folder of a data set")

A field's annotation is the type of its flag: `str`, `int`, `float` or `bool`, with `| None` if the
default is None. `--name=value` and `--name value` mean the same.
"""

import dataclasses
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from absl import flags as absl_flags

from tftpu.config import ClusterConfig, Experiment, read_fields
from tftpu.errors import UserError, did_you_mean
from tftpu.launch.settings import config_flags, own_code
from tftpu.launch.settings.config_values import describe_kind
from tftpu.launch.startup import import_tensorflow
from tftpu.storage import files

FOLDER = "DIR"  # placeholder for a folder, local or gs://
HELP = ("-h", "--help", "-help", "--helpfull")
OVERRIDE = "config."  # prefix of an override's name, as in --config.train.steps
_KINDS = {
    bool: absl_flags.DEFINE_boolean,
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    str: absl_flags.DEFINE_string,
}
_SPEC = "tftpu_flag"  # the key in a field's metadata


class Options(Protocol):
    """An instance of a frozen dataclass; see this module's docstring."""

    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[Any]]]


AnyOptions = TypeVar("AnyOptions", bound=Options)


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command, or its positional argument.

    Attributes:
        name: without dashes.
        kind: type of the value.
        default: value if the flag is not given; None if it is required.
        help: one line.
        shown: the default as the help shows it; "": it shows none.
        metavar: placeholder of the value in the help, such as "FILE".
        required: whether a command line without the flag is an error.
        hint: returns further text for that error.
        minimum: lowest value allowed; None if there is no limit.
        positional: whether the value is given without `--name`.
        several: whether a positional argument takes several values, or a flag may be repeated.
    """

    name: str
    kind: type
    default: Any
    help: str
    shown: str
    metavar: str
    required: bool
    hint: Callable[[], str]
    minimum: float | None
    positional: bool
    several: bool

    @property
    def usage(self) -> str:
        """The flag as the help writes it: `--name=VALUE`, `--[no]name` or `NAME`."""
        if self.positional:
            return f"{self.metavar}..." if self.several else self.metavar
        if self.kind is bool:
            return f"--[no]{self.name}"
        return f"--{self.name}={self.metavar}"


@dataclasses.dataclass(frozen=True)
class _FlagSpec:
    """The declaration of a flag in its field."""

    help: str
    shown: str | None = None
    metavar: str = "VALUE"
    hint: Callable[[], str] = lambda: ""
    minimum: float | None = None
    positional: bool = False


def flag(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    metavar: str = "VALUE",
    shown: str | None = None,
) -> Any:
    """Declares a flag with a default; a flag of `tuple[str, ...]` may be repeated.

    Args:
        default: a value of the field's type.
        help: one line, without the default.
        minimum: lowest value allowed.
        metavar: placeholder of the value in the help.
        shown: the default as the help shows it, if the value itself is not clear.
    """
    spec = _FlagSpec(help, shown, metavar, minimum=minimum)
    return dataclasses.field(default=default, metadata={_SPEC: spec})


def required(metavar: str, help: str, *, hint: Callable[[], str] = lambda: "") -> Any:
    """Declares a flag that must be given.

    Args:
        metavar: placeholder of the value in the help and in the error, such as "FILE".
        help: one line.
        hint: a function that returns a further text for the error, such as the possible values.
    """
    return dataclasses.field(metadata={_SPEC: _FlagSpec(help, metavar=metavar, hint=hint)})


def argument(metavar: str, help: str) -> Any:
    """Declares the positional argument: one value for `str`, one or more for `tuple[str, ...]`."""
    return dataclasses.field(metadata={_SPEC: _FlagSpec(help, metavar=metavar, positional=True)})


def list_flags(options: type[Options]) -> tuple[Flag, ...]:
    """Returns the flags of an options class, inherited ones first."""
    kinds = read_fields(options)
    found = []
    for field in dataclasses.fields(options):
        if _SPEC not in field.metadata:
            continue
        spec: _FlagSpec = field.metadata[_SPEC]
        is_required = field.default is dataclasses.MISSING
        default = None if is_required else field.default
        kind = kinds[field.name]
        found.append(
            Flag(
                name=field.name,
                # The kind of one value: int for `int | None`, str for `tuple[str, ...]`.
                kind=next(part.declared for part in kind.walk() if part.declared in _KINDS),
                default=default,
                help=spec.help,
                shown=_format_default(default) if spec.shown is None else spec.shown,
                metavar=spec.metavar,
                required=is_required,
                hint=spec.hint,
                minimum=spec.minimum,
                positional=spec.positional,
                several=kind.container is tuple,
            )
        )
    return tuple(found)


def takes_config(options: type[Options]) -> bool:
    """Returns whether a command takes --config and its overrides."""
    return issubclass(options, Overrides)


def parse(command: str, options: type[AnyOptions], words: Sequence[str]) -> AnyOptions:
    """Parses the words after the command's name on the command line.

    Args:
        command: its name, for error messages.
        options: the class to make an instance of.
        words: the words to parse.

    Raises:
        UserError: an unknown flag, a value of the wrong type, or missing or superfluous words.
    """
    flags = {flag.name: flag for flag in list_flags(options)}
    named, overrides, alone = _split(command, flags, words)
    values: dict[str, Any] = _parse_by_absl(
        {n: f for n, f in flags.items() if not f.positional}, named
    )
    positional = next((flag for flag in flags.values() if flag.positional), None)
    required = [flag for flag in flags.values() if flag.required and not flag.positional]
    missing = [flag for flag in required if not values[flag.name]]
    if positional is None or (len(alone) > 1 and not positional.several):
        if alone:
            hint = f" Did you mean --{missing[0].name}={alone[-1]}?" if missing else ""
            raise UserError(
                f"tftpu {command} takes only flags such as --flag=value, not {alone[-1]!r}.{hint}"
                if positional is None
                else f"tftpu {command} takes one {positional.metavar}, but {len(alone)} are given."
            )
    elif not alone:
        raise UserError(
            f"tftpu {command} needs {positional.usage} ({positional.help}), as in "
            f"`tftpu {command} {positional.metavar}`."
        )
    else:
        values[positional.name] = tuple(alone) if positional.several else alone[0]
    if overrides:
        if not takes_config(options):
            raise UserError(
                f"tftpu {command} takes no --config: it uses the config of the workdir."
            )
        values["overrides"] = tuple(overrides)
    if missing:
        wanted = " and ".join(flag.usage for flag in missing)
        hints = " ".join(filter(None, (flag.hint() for flag in missing)))
        raise UserError(f"tftpu {command} needs {wanted}.{f' {hints}' if hints else ''}")
    return options(**values)


def to_argv(options: Options) -> list[str]:
    """Returns the arguments that `parse` turns into these options; defaults are left out."""
    words, alone = [], []
    for flag in list_flags(type(options)):
        value = getattr(options, flag.name)
        if flag.positional:
            alone = ["--", *(value if flag.several else [value])]
        elif value != flag.default or flag.required:
            shown = str(value).lower() if flag.kind is bool else value
            words += [f"--{flag.name}={v}" for v in (value if flag.several else [shown])]
    return [*words, *getattr(options, "overrides", ()), *alone]


def _split(
    command: str, flags: Mapping[str, Flag], words: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """Splits words into flags and overrides (both as --name=value) and positional values."""
    named, overrides, alone = [], [], []
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
        flag = flags.get(name) or _find_negated(flags, name)
        if not is_override and (flag is None or flag.positional):
            known = [f.name for f in flags.values() if not f.positional]
            raise UserError(
                f"tftpu {command} has no flag --{name} (tftpu {command} --help lists its "
                f"flags).{did_you_mean(name, known)}"
            )
        if not equals and not (flag and flag.kind is bool):
            if not rest or (rest[0].startswith("-") and not _is_number(rest[0])):
                raise UserError(f"--{name} has no value: write --{name}=VALUE.")
            equals, value = "=", rest.pop(0)
        if equals and not value and not is_override:
            raise UserError(f"--{name} has no value: write --{name}=VALUE, or leave it out.")
        (overrides if is_override else named).append(f"--{name}{equals}{value}")
    return named, overrides, alone


def _find_negated(flags: Mapping[str, Flag], name: str) -> Flag | None:
    """Returns the flag that `--noNAME` sets to false; None if there is none."""
    flag = flags.get(name.removeprefix("no"))
    return flag if flag is not None and flag.kind is bool else None


def _parse_by_absl(flags: Mapping[str, Flag], words: list[str]) -> dict[str, Any]:
    """Parses `--name=value` words by absl."""
    values = absl_flags.FlagValues()
    for flag in flags.values():
        define: Any = absl_flags.DEFINE_multi_string if flag.several else _KINDS[flag.kind]
        default = list(flag.default) if flag.several else flag.default
        limits = {"lower_bound": flag.minimum} if flag.kind in (int, float) else {}
        define(flag.name, default, flag.help, flag_values=values, **limits)
    for word in words:
        flag = flags[_resolve_name(flags, word)]
        try:
            values(["tftpu", word])
            if flag.kind is float and not math.isfinite(values[flag.name].value or 0):
                raise absl_flags.IllegalFlagValueError
        except absl_flags.Error as error:
            least = f" of {flag.minimum:g} or more" if flag.minimum is not None else ""
            expected = describe_kind(flag.kind)
            raise UserError(f"{word}: the value must be {expected}{least}.") from error
        if flag.metavar == FOLDER:
            files.check_folder(f"--{flag.name}", str(values[flag.name].value))
    found = {name: values[name].value for name in flags}
    return {name: tuple(v or ()) if flags[name].several else v for name, v in found.items()}


def _resolve_name(flags: Mapping[str, Flag], word: str) -> str:
    name = word.lstrip("-").partition("=")[0]
    return name if name in flags else name.removeprefix("no")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _format_default(default: Any) -> str:
    if default is None or default in ("", ()):
        return ""
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower() if isinstance(default, bool) else str(default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """Changes of a config, in the form of the command line: "--config.train.steps=500"."""

    overrides: tuple[str, ...] = ()


def _format_config_hint() -> str:
    return f"The configs are {', '.join(config_flags.list_names())}; or give the path of your own."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigOptions(Overrides):
    """The options of a command that takes a config."""

    config: str = required(
        "NAME", "name of a config (`tftpu configs`), or path of your own", hint=_format_config_hint
    )

    @property
    def name(self) -> str:
        """The name of the config, also if it is given by its path."""
        return os.path.basename(self.config).removesuffix(".py")

    @property
    def default_workdir(self) -> str:
        """The workdir of a run if none is given."""
        return os.path.join("runs", self.name)

    def load_experiment(self) -> Experiment:
        """Loads the config with its overrides, and validates it.

        Raises:
            UserError: there is no such config, or a value in it is wrong.
        """
        experiment = config_flags.load(self.config, list(self.overrides))
        self.set_cluster(experiment.cluster)
        own_code.validate(experiment)
        return experiment

    def set_cluster(self, cluster: ClusterConfig) -> None:
        """Sets the devices that the command line names; without any, keeps the config's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The options of a command that uses the devices of this machine."""

    tpu: str | None = flag(
        None,
        "auto, local, none, or the name of a TPU",
        metavar="NAME",
        shown="that of the config, else auto",
    )
    virtual_devices: int | None = flag(
        None, "split the CPU into this many devices, to try several replicas", metavar="N"
    )

    def set_cluster(self, cluster: ClusterConfig) -> None:
        """Sets the devices of a config to these; options that are not given change nothing."""
        if self.tpu is not None:
            cluster.tpu = self.tpu
        if self.virtual_devices is not None:
            cluster.virtual_devices = self.virtual_devices

    def split_cpu(self, config: str | None) -> None:
        """Splits the CPU before a config file loads, whose Keras objects would start TensorFlow."""
        if config and config.endswith(".py") and (self.virtual_devices or 0) > 1:
            import_tensorflow()
            from tftpu.engines.tensorflow import cluster

            cluster.split_cpu(self.virtual_devices or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(DeviceOptions, ConfigOptions):
    """The options of a command that runs a config on the devices of this machine."""

    def load_experiment(self) -> Experiment:
        self.split_cpu(self.config)
        return super().load_experiment()
