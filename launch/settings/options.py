"""The options of a command: the fields of a frozen dataclass, each of which is a flag.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options(ConfigOptions):
        folder: str = required("DIR", "folder of a data set", word=True)
        output: str = required("FILE", "file to write")
        workers: int = flag(0, "number of processes", minimum=0)
        limit: float = flag(60.0, "how long it may take", metavar=TIME)

A field's annotation is the type of its flag: `str`, `int`, `float` or `bool`, with `| None` if the
default is None. `tftpu.launch.settings.parsing` parses command lines.
"""

import dataclasses
import os
import sys
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeGuard

from tftpu.amounts import format_period
from tftpu.config import ClusterConfig, Experiment, read_fields
from tftpu.launch.settings import config_flags, own_code
from tftpu.launch.startup import import_tensorflow

FOLDERS = ("DIR", "RUN")  # placeholders for a folder, local or gs://; RUN: the folder of a run
ADDRESS = "KIND:WHAT"  # placeholder for the address of records, such as images:FOLDER
TIME = "TIME"  # placeholder for a number of seconds, or a text such as "90m"
KINDS = (bool, int, float, str)
_SPEC = "tftpu_flag"  # the key of a flag's declaration in its field's metadata


class Options(Protocol):
    """An instance of a frozen dataclass; see this module's docstring."""

    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[Any]]]


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command.

    Attributes:
        name: name of the flag without dashes.
        kind: type of the value; of one value if `several`.
        default: value if the flag is not given; None if it is required.
        help: description of the flag in the help, one line.
        shown: the default as the help shows it; "": the help shows no default.
        metavar: placeholder of the value in the help, such as "FILE".
        required: whether a command line without the flag is an error.
        hint: a function that returns further text for that error.
        minimum: lowest value allowed; None if there is no limit.
        word: whether the value may be given without `--name`.
        several: whether the flag may be repeated, or several values given without its name.
        aliases: other names of the flag.
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
    word: bool
    several: bool
    aliases: tuple[str, ...]

    @property
    def usage(self) -> str:
        """The flag as the help writes it: `--name=VALUE`, `--[no]name` or `NAME`."""
        if self.word:
            return f"{self.metavar}..." if self.several else self.metavar
        if self.kind is bool:
            return f"--[no]{self.name}"
        return f"--{self.name}={self.metavar}"


@dataclasses.dataclass(frozen=True)
class _FlagSpec:
    """The declaration of a flag, in its field's metadata."""

    help: str
    shown: str | None = None
    metavar: str = "VALUE"
    hint: Callable[[], str] = lambda: ""
    minimum: float | None = None
    word: bool = False
    aliases: tuple[str, ...] = ()


def flag(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    metavar: str = "VALUE",
    shown: str | None = None,
    word: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declares a flag with a default; a flag of `tuple[str, ...]` may be repeated.

    Args:
        default: a value of the field's type.
        help: one line, without the default.
        minimum: lowest value allowed.
        metavar: placeholder of the value in the help.
        shown: the default as the help shows it, if the value itself is not clear.
        word: whether the value may be given without the flag's name, for one flag of a command.
        aliases: other names of the flag.
    """
    spec = _FlagSpec(help, shown, metavar, minimum=minimum, word=word, aliases=aliases)
    return dataclasses.field(default=default, metadata={_SPEC: spec})


def required(
    metavar: str,
    help: str,
    *,
    hint: Callable[[], str] = lambda: "",
    word: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declares a flag that must be given.

    Args:
        metavar: placeholder of the value in the help and in the error, such as "FILE".
        help: one line.
        hint: a function that returns a further text for the error, such as the possible values.
        word, aliases: as for `flag`.
    """
    spec = _FlagSpec(help, metavar=metavar, hint=hint, word=word, aliases=aliases)
    return dataclasses.field(metadata={_SPEC: spec})


def list_flags(options: type[Options]) -> tuple[Flag, ...]:
    """Returns the flags of an options class: the `word` flag, then inherited ones, then its own."""
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
                kind=next(part.declared for part in kind.walk() if part.declared in KINDS),
                default=default,
                help=spec.help,
                shown=_format_default(spec, default) if spec.shown is None else spec.shown,
                metavar=spec.metavar,
                required=is_required,
                hint=spec.hint,
                minimum=spec.minimum,
                word=spec.word,
                several=kind.container is tuple,
                aliases=spec.aliases,
            )
        )
    return tuple(sorted(found, key=lambda flag: not flag.word))


def takes_config(options: type) -> "TypeGuard[type[Overrides]]":
    """Returns whether a command takes --config and its overrides."""
    return issubclass(options, Overrides)


def _format_default(spec: _FlagSpec, default: Any) -> str:
    if default is None or default in ("", ()):
        return ""
    if spec.metavar == TIME:
        return format_period(default)
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower() if isinstance(default, bool) else str(default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """Changes of a config, in the form of the command line: "--config.train.steps=500"."""

    OVERRIDES_HELP: ClassVar[str] = "any field of the config, such as --config.train.steps=500"

    overrides: tuple[str, ...] = ()


def require_config(help: str) -> Any:
    """Declares the argument CONFIG of a command; `help` says which values are allowed."""
    return required("CONFIG", help, hint=_format_config_hint, word=True)


def _format_config_hint() -> str:
    return f"The configs are {', '.join(config_flags.list_names())}; or give the path of your own."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigOptions(Overrides):
    """The options of a command that takes a config."""

    config: str = require_config("name of a config (`tftpu configs`), or path of your own")

    @property
    def name(self) -> str:
        """The name of the config, also if it is given by its path."""
        return os.path.basename(self.config.rstrip("/")).removesuffix(".py")

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
        """Keeps the config's devices; `DeviceOptions` sets those that the command line names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The options of a command that uses the devices of this machine."""

    tpu: str | None = flag(
        None,
        "auto, local, none, or the name of a TPU",
        metavar="NAME",
        shown="cluster.tpu of the config, otherwise auto",
    )
    virtual_devices: int | None = flag(
        None, "split the CPU into this many devices, to try several replicas", metavar="N"
    )

    def set_cluster(self, cluster: ClusterConfig) -> None:
        """Sets the devices of a config from these options; those not given change nothing."""
        if self.tpu is not None:
            cluster.tpu = self.tpu
        if self.virtual_devices is not None:
            cluster.virtual_devices = self.virtual_devices

    def split_cpu(self, config: str | None) -> None:
        """Splits the CPU for a config file, which may start TensorFlow or JAX.

        It does so if it makes a Keras metric or optimizer, which has variables.
        """
        name, overrides = "--config.cluster.virtual_devices=", getattr(self, "overrides", ())
        given = [word.removeprefix(name) for word in overrides if word.startswith(name)]
        count = self.virtual_devices or next((int(n) for n in given[::-1] if n.isdecimal()), 1)
        if config and config.endswith(".py") and count > 1:
            if "jax" not in sys.modules:  # JAX reads these when it is imported
                os.environ.update({"JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu"})
            import_tensorflow()
            from tftpu.engines.tensorflow import cluster

            cluster.split_cpu(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(DeviceOptions, ConfigOptions):
    """The options of a command that runs a config on the devices of this machine."""

    def load_experiment(self) -> Experiment:
        self.split_cpu(self.config)
        return super().load_experiment()
