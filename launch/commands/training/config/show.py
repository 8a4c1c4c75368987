"""Shows every field of a config, or of a run, after the overrides of the command line.

Each line is a flag of `tftpu train`, without its dashes.

    tftpu config show digits_resnet --config.train.steps=500
    tftpu config show runs/digits_resnet
    tftpu config show python_gpt --sharding --config.cluster.mesh=fsdp:8
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from tftpu.config import Function, KerasObject
from tftpu.engines import selection
from tftpu.launch import startup
from tftpu.launch.run import finished
from tftpu.launch.settings.options import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(finished.ConfigOrRunOptions):
    """The config to show."""

    sharding: bool = flag(
        False, "show the shard of each variable that a device of the config's mesh holds"
    )


def run(options: Options) -> None:
    """Prints the fields, one per line; or with --sharding the variables of the model.

    Raises:
        UserError: there is no such config, or a value in it is wrong.
    """
    experiment = options.load_experiment()
    if options.sharding:
        selection.choose_backend(dataclasses.replace(experiment.cluster, engine="jax"))
        startup.import_tensorflow()
        from tftpu.launch.preflight import sharding_table

        print("\n".join(sharding_table.format_lines(experiment)))
        return
    rows = list(iterate_lines("config", experiment))
    width = max(len(path) for path, _ in rows)
    print("\n".join(f"{path:{width}}  {text}" for path, text in rows))


def iterate_lines(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields a value's path and text; for a dataclass, those of its class and of each field.

    Args:
        path: the path of the value, such as "config.model".
        value: an experiment, or a value in it.
    """
    if isinstance(value, KerasObject | Function) or not dataclasses.is_dataclass(value):
        yield path, format_value(value)
        return
    if path != "config":
        yield path, f"{type(value).__module__}.{type(value).__qualname__}"
    for field in dataclasses.fields(value):
        yield from iterate_lines(f"{path}.{field.name}", getattr(value, field.name))


def format_value(value: Any) -> str:
    """Formats a value as a flag takes it; if no flag takes it, as the name of its class."""
    if isinstance(value, KerasObject):
        known = value.description["config"].items()
        settings = ", ".join(f"{k}={v!r}" for k, v in known if v is not None and v is not False)
        return f"{value.name}({settings})"
    if isinstance(value, Function):
        return value.name
    if isinstance(value, list | tuple):
        return f"({','.join(map(format_value, value))})"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float | str | dict):
        return str(value) if value != "" else "''"
    return f"{type(value).__module__}.{type(value).__qualname__}"
