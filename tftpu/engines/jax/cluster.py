"""Connects the JAX engine to the available devices."""

import contextlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jax

from tftpu.config.mesh import mesh_sizes
from tftpu.engines.jax.engine import JaxEngine
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.processes import coordination
from tftpu.engines.jax.processes.hosts import JaxHosts
from tftpu.errors import UserError, counted
from tftpu.runtime import hosts
from tftpu.runtime.hosts import Task
from tftpu.tpu import environment
from tftpu.tpu.compiler_options import AUTO

# The engine that the last `connect` created. Models have no reference to their engine.
_connected: list[JaxEngine] = []


def connect(
    tpu: str,
    virtual_devices: int | None,
    mesh: str | None,
    compiler_options: str = AUTO,
    host_timeout: float = 30.0,
) -> JaxEngine:
    """Returns the engine for all devices that JAX finds, on all hosts that train together.

    Args:
        tpu: "auto": the TPU if there is one, else GPUs, else the CPU; "local": the TPU of this
            machine; "none": no TPU.
        virtual_devices: number of devices that each host's CPU is split into, or None.
        mesh, compiler_options, host_timeout: as for `tftpu.connect`.

    Raises:
        UserError: a requested TPU is not available, or the mesh does not fit the devices.
        HostLost: another host did not connect in time.
    """
    place = find_task(tpu, virtual_devices)
    together = None
    if place.count > 1:
        together = JaxHosts(coordination.start(place, host_timeout))
    found = _choose_devices(tpu, virtual_devices)
    if jax.process_count() != place.count:
        raise UserError(
            f"JAX finds the devices of {jax.process_count()} hosts, but this run has "
            f"{place.count}. On a slice of several hosts, run the same command on each host; the "
            "metadata server or TF_CONFIG must name them all. If they do, JAX ran before it could "
            "connect to them: a config must not make Keras metrics or optimizers, or use JAX, but "
            'name them, as metrics=["AUC"].'
        )
    sizes = mesh_sizes(mesh, len(found))
    _connected[:] = [JaxEngine(meshes.make(sizes, found), compiler_options, together)]
    return _connected[0]


def find_task(tpu: str, virtual_devices: int | None) -> Task:
    """Returns the index of this process, and the number of processes that train together.

    They come from TF_CONFIG, or on a TPU slice of several hosts from the metadata server.

    Args:
        tpu, virtual_devices: as for `connect`.

    Raises:
        UserError: TF_CONFIG is invalid.
    """
    found = hosts.read_task()
    on_tpu = tpu in ("auto", "local") and virtual_devices is None and environment.has_tpu()
    return coordination.find_slice_task() if found.count == 1 and on_tpu else found


def resolve_engine() -> JaxEngine:
    """Returns the engine of the last `connect`; without one, an engine for the first device."""
    if not _connected:
        _connected.append(JaxEngine(meshes.make(mesh_sizes(None, 1), _find_devices()[:1])))
    return _connected[0]


def detect_platform() -> str:
    """Returns the platform of JAX's first device: "tpu", "gpu" or "cpu"."""
    return _find_devices()[0].platform


def _choose_devices(tpu: str, virtual_devices: int | None) -> Sequence[meshes.Device]:
    if virtual_devices is not None or tpu == "none":
        return _create_virtual_cpus(virtual_devices) if virtual_devices else _find_without_tpu()
    if tpu not in ("auto", "local"):
        raise UserError(
            f"tpu={tpu!r} names a TPU, but the JAX engine must run on the machine to which the "
            "TPU is attached: run it there, with tpu='local'."
        )
    devices = _find_devices()
    if tpu == "local" and devices[0].platform != "tpu":
        raise UserError(
            f"tpu='local' was requested, but JAX finds "
            f"{counted(len(devices), f'{devices[0].platform} device')}. On a TPU VM, install "
            "tftpu with its [jax-tpu] extra. tpu='none' trains on the CPU or GPUs."
        )
    return devices


def _find_devices() -> Sequence[meshes.Device]:
    """Returns the devices that JAX chooses.

    Without a TPU or a JAX plugin, sets JAX to use the CPU, because a TPU library that is installed
    only for preflight would look for chips and log errors.
    """
    # JAX plugins for other devices, such as GPUs.
    others = importlib.metadata.entry_points(group="jax_plugins")
    settings: Any = jax.config  # JAX declares no types for its options
    if settings.jax_platforms is None and not others and not environment.has_tpu():
        use_cpu()
    return jax.devices()


def _find_without_tpu() -> Sequence[meshes.Device]:
    devices = _find_devices()
    return jax.devices("cpu") if devices[0].platform == "tpu" else devices


def use_cpu() -> None:
    """Makes JAX run on the CPU, so that an installed TPU library does not look for chips.

    Has no effect if JAX is already initialized.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")


def _create_virtual_cpus(count: int) -> Sequence[meshes.Device]:
    with contextlib.suppress(RuntimeError):  # if JAX is already running, it keeps its devices
        jax.config.update("jax_num_cpu_devices", count)
    use_cpu()
    found = jax.local_devices(backend="cpu")
    if len(found) < count:
        raise UserError(
            f"virtual_devices={count} cannot take effect, because JAX already runs with "
            f"{counted(len(found), 'CPU device')}: call tftpu.connect() before anything else uses "
            f"JAX, or on the command line give --virtual_devices={count}."
        )
    return jax.devices("cpu") if jax.process_count() > 1 else found[:count]
