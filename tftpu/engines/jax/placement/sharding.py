"""Chooses the axes of the mesh along which the dimensions of variables are sharded.

The axis `tensor` follows the sharding rules of the model, or rules derived from its layers. `fsdp`
needs no rules: it shards the largest divisible dimension (ZeRO-3; Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054). `sequence` divides the tokens of an example, and also shards the
weights, together with `fsdp` and along the same dimension.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tftpu.config.mesh import DATA, FSDP, SEQUENCE, TENSOR
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.placement.deriving import Axes, derive_axes
from tftpu.errors import UserError, counted, did_you_mean

SMALLEST = 4096  # elements; sharding a smaller array costs more traffic than it saves memory

# A pattern to search for in a variable's path, and the name of a mesh axis or None for each
# dimension. The axis must divide the dimension's size, unless its name ends in a question mark:
# then an indivisible dimension is not sharded.
Rule = tuple[str, Axes]


@runtime_checkable
class ShardableModel(Protocol):
    """A model with sharding rules for the `tensor` axis."""

    @property
    def sharding_rules(self) -> Sequence[Rule]:
        """The sharding rules; the first rule that matches a variable applies."""
        ...


class Layout:
    """The shardings of a model's variables on a mesh.

    Args:
        mesh: the mesh; an abstract mesh has shardings, but no values can be placed on it.
        model: the built model; its `sharding_rules`, if any, are for the `tensor` axis. For a
            model without rules, they are derived from its layers.

    Attributes:
        mesh: the argument.
        whole: the sharding of values that every device holds in full.

    Raises:
        UserError: a model without rules has a mesh with a `sequence` axis; or no weight can be
            sharded along the mesh's `tensor` axis; or a rule matches no variable, or one with too
            few dimensions, or names an axis that is unknown or does not divide a dimension.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, model: keras.Model):
        self.mesh = mesh
        self.whole = NamedSharding(mesh, PartitionSpec())
        self._rules: Sequence[Rule] = ()
        self._derived: dict[str, Axes] = {}
        rules = model.sharding_rules if isinstance(model, ShardableModel) else ()
        if mesh.shape[SEQUENCE] > 1 and not rules:
            raise UserError(
                f"The mesh has a {SEQUENCE!r} axis, but the {type(model).__name__} {model.name!r} "
                "has no sharding_rules: its attention does not know that other devices hold the "
                f"rest of the tokens. Use the axes {DATA!r}, {FSDP!r} and {TENSOR!r}, which work "
                "with any model."
            )
        if mesh.shape[TENSOR] > 1 and rules:
            self._rules = rules
            self._check_rules([v.path for v in model.variables])
        elif mesh.shape[TENSOR] > 1:
            self._derived = derive_axes(model, f"{TENSOR}?")
        self._specs = {v.path: self._find_spec(v.path, tuple(v.shape)) for v in model.variables}
        if mesh.shape[TENSOR] > 1 and not any(TENSOR in spec for spec in self._specs.values()):
            raise UserError(
                f"The mesh has {TENSOR}:{mesh.shape[TENSOR]}, but no layer of the "
                f"{type(model).__name__} {model.name!r} has a vocabulary, heads, units or filters "
                f"whose number {mesh.shape[TENSOR]} divides. Use the axes {DATA!r} and {FSDP!r}."
            )
        # Optimizers name the slots of a variable after the variable.
        self._slots = {
            path.replace("/", "_"): (tuple(v.shape), self._specs[path])
            for path, v in ((v.path, v) for v in model.trainable_variables)
        }

    def find_weight_sharding(self, variable: keras.Variable) -> NamedSharding:
        """Returns the sharding of a variable of the model."""
        return NamedSharding(self.mesh, self._specs[variable.path])

    def find_slot_sharding(self, variable: keras.Variable) -> NamedSharding:
        """Returns the sharding of an optimizer's variable, which is its weight's if it has one."""
        shape = tuple(variable.shape)
        name = variable.name
        for weight, (of_weight, spec) in self._slots.items():
            if name.startswith(f"{weight}_") and shape == of_weight:
                return NamedSharding(self.mesh, spec)
        return NamedSharding(self.mesh, self._shard_largest_dimension(shape, [None] * len(shape)))

    def build_batch_sharding(self, dimensions: int, before: int = 0) -> NamedSharding:
        """Returns the sharding of a tensor whose examples are divided among the devices.

        Args:
            dimensions: the number of dimensions of the tensor.
            before: the index of the dimension along which the examples are stacked.
        """
        axes = meshes.list_batch_axes(self.mesh) or None
        rest = [None] * (dimensions - before - 1)
        return NamedSharding(self.mesh, PartitionSpec(*[None] * before, axes, *rest))

    def _find_spec(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        axes: list[Any] = [None] * len(shape)
        matching = (rule for rule in self._rules if re.search(rule[0], path))
        rule = next(matching, (path, self._derived.get(path, ())))
        for place, axis in enumerate(rule[1]):
            if axis is None:
                continue
            optional, axis = axis.endswith("?"), axis.removesuffix("?")
            if axis not in self.mesh.shape:
                raise UserError(
                    f"The sharding rule {rule} names the axis {axis!r}, which a mesh does not have."
                    f"{did_you_mean(axis, self.mesh.shape)}"
                )
            if place >= len(shape):
                raise UserError(
                    f"The sharding rule {rule} is for at least {counted(place + 1, 'dimension')}, "
                    f"but {path!r} has the shape {shape}: write a pattern that does not match it, "
                    f"instead of {rule[0]!r}."
                )
            if shape[place] % self.mesh.shape[axis]:
                if optional:
                    continue
                raise UserError(
                    f"The sharding rule {rule} cannot divide {path!r}, of shape {shape}, into "
                    f"{self.mesh.shape[axis]} equal shards along {axis!r}: use another size of "
                    "that axis."
                )
            axes[place] = axis
        return self._shard_largest_dimension(shape, axes)

    def _shard_largest_dimension(self, shape: tuple[int, ...], axes: list[Any]) -> PartitionSpec:
        """Returns a spec of `axes`, with `fsdp` and `sequence` on the largest other dimension."""
        names = meshes.list_weight_axes(self.mesh)
        parts = math.prod(self.mesh.shape[name] for name in names)
        if parts > 1 and np.prod(shape) >= SMALLEST:
            free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % parts == 0]
            if free:
                largest = max(free, key=lambda i: shape[i])
                axes[largest] = names if len(names) > 1 else "".join(names)
        return PartitionSpec(*axes)

    def _check_rules(self, paths: Sequence[str]) -> None:
        for pattern, _ in self._rules:
            if not any(re.search(pattern, path) for path in paths):
                raise UserError(
                    f"The sharding rule {pattern!r} matches no variable of the model (one of them "
                    f"is {paths[0]!r}), so the intended weights would not be sharded."
                )
