"""The table of `tftpu config show --sharding`: the shard of each variable on one device."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from tftpu.config import Experiment
from tftpu.config.mesh import AUTO, AXES, parse_mesh
from tftpu.engines import selection
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.errors import UserError
from tftpu.launch.run import experiment as build

_MIB = 2**20


def format_lines(experiment: Experiment) -> Iterator[str]:
    """Yields the lines of the table, and the totals. It allocates no memory for the model.

    Args:
        experiment: a validated experiment, whose mesh has a size for every axis that it names.

    Raises:
        UserError: the sizes of the mesh are unknown, or it does not fit the model, or the model has
            no weights after build() or has its own objectives.
    """
    layout, model, optimizer = _build_layout(experiment)
    rows = [
        _build_row(variable, layout.find_weight_sharding(variable)) for variable in model.weights
    ]
    paths, shapes, axes_of, _ = zip(*rows)
    first, second, third = (max(map(len, column)) for column in (paths, shapes, axes_of))
    for variable, (path, shape, axes, held) in zip(model.weights, rows):
        frozen = "" if variable.trainable else "  not trained"
        yield f"{path:{first}}  {shape:>{second}}  {axes:{third}}  {held / _MIB:10.3f} MiB{frozen}"
    slots = sum(_count_bytes(slot, layout.find_slot_sharding(slot)) for slot in optimizer.variables)
    weights = sum(held for *_, held in rows)
    whole = sum(_count_bytes(variable, layout.whole) for variable in model.weights)
    devices = math.prod(layout.mesh.shape.values())
    yield (
        f"A device of {devices} holds {weights / _MIB:,.1f} of {whole / _MIB:,.1f} MiB of weights, "
        f"and {slots / _MIB:,.1f} MiB of the optimizer's state."
    )


def _build_layout(
    experiment: Experiment,
) -> tuple[Layout, keras.Model, keras.optimizers.Optimizer]:
    """Returns the layout of an experiment's model, the model, and its optimizer, without values.

    Raises:
        UserError: see `format_lines`.
    """
    given = experiment.cluster.mesh
    if given in (None, AUTO) or -1 in parse_mesh(given).values():
        raise UserError(
            f"--sharding needs a mesh with all of its sizes, but the config has {given!r}: set a "
            "mesh such as --config.cluster.mesh=fsdp:8."
        )
    selection.connect("none", 1, "jax")  # the table does not depend on the devices of this machine
    experiment = build.resolve_length(experiment)
    experiment = dataclasses.replace(experiment, model=experiment.model.without_weights())
    model = _trace(lambda: build.build_layers(experiment))
    if not model.built or build.has_objectives(experiment):
        raise UserError(
            "--sharding works only with models whose weights exist after build() and that have one "
            f"optimizer; {type(experiment.model).__name__} builds another kind of model."
        )
    optimizer = build.build_optimizer(experiment)
    _trace(lambda: optimizer.build(model.trainable_variables))
    sizes = {**dict.fromkeys(AXES, 1), **parse_mesh(given)}
    return Layout(AbstractMesh(tuple(sizes.values()), tuple(sizes)), model), model, optimizer


def _trace(build: Callable[[], Any]) -> Any:
    """Returns the result of a function whose new variables get shapes, but no values."""
    built: list[Any] = []
    jax.eval_shape(lambda: built.append(build()))
    return built[0]


def _build_row(variable: keras.Variable, sharding: NamedSharding) -> tuple[str, str, str, int]:
    """Returns path, shape, axes of the dimensions such as "- x fsdp", and bytes on a device."""
    shape = "x".join(map(str, variable.shape)) or "1"
    axes = " x ".join(map(_format_axes, sharding.spec)) or "-"
    return variable.path, shape, axes, _count_bytes(variable, sharding)


def _format_axes(axes: str | tuple[str, ...] | None) -> str:
    return "+".join(axes) if isinstance(axes, tuple) else axes or "-"


def _count_bytes(variable: keras.Variable, sharding: NamedSharding) -> int:
    shard = sharding.shard_shape(tuple(variable.shape))
    return math.prod(shard) * np.dtype(variable.dtype).itemsize
