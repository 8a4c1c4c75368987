"""Chooses the mesh of a run with --config.cluster.mesh=auto."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tftpu.config import ClusterConfig
from tftpu.config.mesh import AUTO, DATA
from tftpu.errors import UserError
from tftpu.launch.diagnosis import tpu
from tftpu.launch.diagnosis.machine import Machine
from tftpu.tpu import hardware
from tftpu.tpu.slices import GENERATIONS


def choose_mesh(cluster: ClusterConfig, words: Sequence[str]) -> str | None:
    """Returns the mesh of a config on this machine's devices; None if the config has none.

    `auto` stands for the mesh that shards the model least and still fits, which preflight finds in
    a separate process. Without a TPU, each device holds the whole model.

    Args:
        cluster: the cluster of the config.
        words: the config and its overrides, as on the command line.

    Raises:
        UserError: no mesh fits, preflight failed, or the generation of the TPU is unknown.
    """
    if cluster.mesh != AUTO:
        return cluster.mesh
    chips = len(tpu.list_devices(Machine()))
    if cluster.tpu == "none" or cluster.virtual_devices or not chips:
        return f"{DATA}:-1"
    generation = GENERATIONS.get(hardware.find_attached_tpu() or "")
    if generation is None:
        raise UserError(
            "cluster.mesh=auto needs to know the TPU's generation, which could not be detected: "
            "set the mesh, such as --config.cluster.mesh=fsdp:-1."
        )
    return find_fitting(f"{generation.name}-{chips * generation.counted}", words)


def find_fitting(slice_name: str, words: Sequence[str]) -> str:
    """Returns the mesh that shards a config's model least, of those that fit on a slice.

    Args:
        slice_name: the name of the slice, such as "v5e-8".
        words: see `choose_mesh`.

    Raises:
        UserError: no mesh fits, or preflight failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "preflight.json")
        command = [sys.executable, "-P", "-m", "tftpu.launch.main", "preflight", *words]
        done = subprocess.run(
            [*command, f"--slices={slice_name}", f"--json={report}", f"--workdir={folder}"],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode and not report.exists():
            raise UserError(
                f"cluster.mesh=auto: preflight for {slice_name} failed for the reason above. To "
                "train without preflight, set the mesh, such as --config.cluster.mesh=fsdp:-1."
            )
        [found] = json.loads(report.read_text())["slices"]
    if not found["fits"]:
        advice = " ".join(found["advice"]) or found["error"]
        raise UserError(f"No mesh of {slice_name} makes the step fit into its memory. {advice}")
    return found["mesh"]
