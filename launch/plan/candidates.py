"""The candidates of a plan: slices, and settings of a config that do not change what it computes.

All candidates have the global batch of the config, so each one trains the same model.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tftpu.blocks import JAX_REMATS, REMATS
from tftpu.config import ClusterConfig, Experiment
from tftpu.config.mesh import (
    AUTO,
    check_between_slices,
    count_batch_shards,
    list_meshes,
    mesh_sizes,
    mesh_text,
)
from tftpu.errors import UserError
from tftpu.kernels import ATTENTIONS, KINDS_OF_ATTENTION
from tftpu.launch.settings import own_code
from tftpu.tpu.slices import Slice, parse_slice

MESH, MICROBATCHES = "cluster.mesh", "train.gradient_accumulation_steps"
ATTENTION = "model.attention"
_MOST_TENSOR = 8  # maximum size of `tensor`; models that need more are too large for a plan


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run a config.

    Attributes:
        slice: the name of the slice.
        mesh: the mesh with the size of every axis; "" on the TensorFlow engine, which has none.
        remat: the kind of rematerialization, such as "block".
        microbatches: the number of microbatches that each shard of the global batch is split into.
        attention: the implementation of the model's attention; "" if the config has no such field.
    """

    slice: str
    mesh: str
    remat: str
    microbatches: int
    attention: str = ""


@dataclasses.dataclass(frozen=True)
class Space:
    """The candidates that a config allows.

    Attributes:
        experiment: the config with the overrides of the command line.
        fixed: the fields that these overrides set; the plan does not change them.
    """

    experiment: Experiment
    fixed: Collection[str] = ()

    @property
    def has_mesh(self) -> bool:
        """True unless the engine is TensorFlow's, which has no mesh."""
        return self.experiment.cluster.engine != "tensorflow"

    @property
    def has_attention(self) -> bool:
        """True if the model has a field for the implementation of its attention."""
        return getattr(self.experiment.model, "attention", None) in ATTENTIONS

    @property
    def remat_field(self) -> str:
        """The field for rematerialization: "model.remat" if the model has it, or "train.remat"."""
        return "model.remat" if hasattr(self.experiment.model, "remat") else "train.remat"

    def plan_cluster(self) -> ClusterConfig:
        """Returns the cluster config with the engine of the plan, and without a mesh."""
        engine = "jax" if self.has_mesh else "tensorflow"
        return dataclasses.replace(self.experiment.cluster, engine=engine, mesh=None)

    def read_remat(self) -> str:
        """Returns the config's value of `remat_field`."""
        return self._read(self.remat_field)

    def list_meshes(self, target: Slice) -> list[str]:
        """Returns the meshes for a slice; [""] on the TensorFlow engine.

        Raises:
            UserError: the config's mesh does not fit the slice.
        """
        if not self.has_mesh:
            return [""]
        given = self.experiment.cluster.mesh
        if MESH in self.fixed and given != AUTO:
            sizes = mesh_sizes(given, target.replicas)
            check_between_slices(sizes, target.slices)
            return [mesh_text(sizes)]
        most = min(_MOST_TENSOR, target.chips_per_host * target.generation.cores)
        return list_meshes(target.replicas, target.slices, most)

    def _list_fitting_meshes(self, target: Slice) -> list[str]:
        """Returns the meshes for a slice; none if the given mesh does not fit it."""
        try:
            return self.list_meshes(target)
        except UserError:
            return []

    def list_states(self, targets: Sequence[Slice]) -> dict[str, tuple[Slice, str]]:
        """Returns a slice and a mesh for each way to shard the state, with `name_state` as the key.

        Args:
            targets: the slices. Meshes that do not divide the global batch are left out.
        """
        batch = self.experiment.data.global_batch_size
        return {
            name_state(mesh, target): (target, mesh)
            for target in targets
            for mesh in self._list_fitting_meshes(target)
            if batch % count_shards(mesh, target) == 0
        }

    def list_candidates(self, target: Slice, blocks: bool, statistics: bool) -> Iterator[Candidate]:
        """Yields the candidates of a slice that the config allows.

        Args:
            target: the slice.
            blocks: whether the model has blocks that `remat` can recompute.
            statistics: whether the model normalizes with statistics of a microbatch, so another
                number of microbatches would change what it trains.
        """
        train = self.experiment.train
        for mesh in self._list_fitting_meshes(target):
            shards = count_shards(mesh, target)
            shard, rest = divmod(self.experiment.data.global_batch_size, shards)
            counts = [n for n in range(1, shard + 1) if shard % n == 0 and not rest]
            if MICROBATCHES in self.fixed or statistics:
                counts = [train.gradient_accumulation_steps]
            for microbatches in counts:
                one = Candidate(target.name, mesh, self.read_remat(), microbatches)
                if self._find_refusal(one, shards):
                    continue
                for attention in self._list_attentions():
                    for remat in self._list_remats(blocks, attention):
                        yield dataclasses.replace(one, remat=remat, attention=attention)

    def explain_refusal(self, target: Slice) -> str:
        """Returns why the config allows no candidate of a slice."""
        try:
            shards = count_shards(self.list_meshes(target)[0], target)
        except UserError as error:
            return str(error)
        microbatches = self.experiment.train.gradient_accumulation_steps
        one = Candidate(target.name, "", self.read_remat(), microbatches)
        return self._find_refusal(one, shards) or "The batch cannot be divided."

    def apply(self, candidate: Candidate) -> Experiment:
        """Returns the experiment with the settings of a candidate, on the plan's engine."""
        values = self._list_values(candidate)
        groups: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "cluster": {}}
        for path, value in values.items():
            group, field = path.split(".")
            groups[group][field] = value
        cluster = groups.pop("cluster")
        changed = {
            name: dataclasses.replace(getattr(self.experiment, name), **fields)
            for name, fields in groups.items()
        }
        changed["cluster"] = dataclasses.replace(self.plan_cluster(), **cluster)
        return dataclasses.replace(self.experiment, **changed)

    def list_changes(self, candidate: Candidate) -> list[str]:
        """Returns a candidate's changes of the config, such as ["model.remat=block"]."""
        return [
            f"{path}={value}"
            for path, value in self._list_values(candidate).items()
            if value != self._read(path)
        ]

    def format_candidate(self, candidate: Candidate) -> str:
        """Returns a candidate as text, such as "v5e-8 model.remat=block"."""
        return " ".join([candidate.slice, *self.list_changes(candidate)])

    def has_settings(self, candidate: Candidate) -> bool:
        """Returns whether a candidate has the config's settings; `auto` and None match anything."""
        values = self._list_values(candidate)
        given = {path: self._read(path) for path in values}
        if given.get(MESH) not in (None, AUTO):
            try:
                sizes = mesh_sizes(given[MESH], parse_slice(candidate.slice).replicas)
            except UserError:  # the config's mesh is for another slice
                return False
            given[MESH] = mesh_text(sizes)
        return all(given[path] in (None, AUTO, value) for path, value in values.items())

    def _list_values(self, candidate: Candidate) -> dict[str, Any]:
        values: dict[str, Any] = {MESH: candidate.mesh} if candidate.mesh else {}
        values |= {self.remat_field: candidate.remat, MICROBATCHES: candidate.microbatches}
        return values | ({ATTENTION: candidate.attention} if candidate.attention else {})

    def _read(self, path: str) -> Any:
        group, field = path.split(".")
        return getattr(getattr(self.experiment, group), field)

    def _list_remats(self, blocks: bool, attention: str) -> Sequence[str]:
        if self.remat_field in self.fixed:
            return [self.read_remat()]
        if self.remat_field == "train.remat" and not blocks:
            return ["none"]
        left_out = () if self.has_mesh else JAX_REMATS
        kernel = "attention"  # without the flash kernel the same remat as "block", so left out
        kept = {self.read_remat(), *([kernel] if attention == "flash" else [])}
        return [r for r in REMATS if r not in left_out and (r != kernel or r in kept)]

    def _list_attentions(self) -> Sequence[str]:
        if not self.has_attention:
            return [""]
        return [self._read(ATTENTION)] if ATTENTION in self.fixed else KINDS_OF_ATTENTION

    def _find_refusal(self, candidate: Candidate, shards: int) -> str:
        """Returns why the config is invalid with a candidate's settings; "" if it is valid."""
        try:
            own_code.validate(self.apply(candidate), shards)
        except UserError as error:
            return str(error)
        return ""


def count_shards(mesh: str, target: Slice) -> int:
    """Returns the number of shards that the devices of a slice divide a global batch into."""
    return count_batch_shards(mesh_sizes(mesh, target.replicas)) if mesh else target.replicas


def name_state(mesh: str, target: Slice) -> str:
    """Returns a key for how the state is sharded: the number of devices and the mesh."""
    return f"{target.replicas} {mesh}".strip()
