"""Checks that a config can be trained on a slice, and chooses the engine to install there."""

from tftpu.config import ClusterConfig, Experiment
from tftpu.config.mesh import AUTO, check_between_slices, count_batch_shards, mesh_sizes
from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.launch.settings import own_code
from tftpu.tpu.slices import Slice


def choose_for_slice(experiment: Experiment, wanted: Slice) -> str:
    """Checks that a config can be trained on a slice, and returns the name of the engine.

    Args:
        experiment: the config.
        wanted: the slice to rent.

    Raises:
        UserError: the global batch or the mesh does not fit the slice; or the config selects the
            TensorFlow engine, and the slice has several hosts or a generation that TensorFlow does
            not support.
    """
    name = selection.choose_engine(experiment.cluster)
    selection.check_generation(name, wanted.generation)
    if name == "tensorflow" and wanted.hosts > 1:
        generation = wanted.generation
        largest = f"{generation.name}-{generation.largest_host * generation.counted}"
        raise UserError(
            f"{wanted.name} has {wanted.hosts} hosts, but the TensorFlow engine uses one host: "
            "add --config.cluster.engine=jax, or choose a slice of one host. The largest slice "
            f"with one host is {largest}."
        )
    if wanted.hosts > 1 and experiment.cluster.mesh == AUTO:
        raise UserError(
            f"cluster.mesh=auto works on one host only, but {wanted.name} has {wanted.hosts} "
            f"hosts. Find a mesh with `tftpu preflight --slices={wanted.name}` and "
            "cluster.mesh=auto, and set that one."
        )
    if wanted.slices > 1:
        check_between_slices(mesh_sizes(experiment.cluster.mesh, wanted.replicas), wanted.slices)
    own_code.validate(experiment, _count_data_shards(experiment.cluster, wanted))
    return name


def _count_data_shards(cluster: ClusterConfig, wanted: Slice) -> int | None:
    """Returns the number of shards of a global batch; None if the mesh is chosen on the machine."""
    if cluster.mesh == AUTO:
        return None
    return count_batch_shards(mesh_sizes(cluster.mesh, wanted.replicas))
