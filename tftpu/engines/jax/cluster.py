"""Connects the JAX engine to the available devices."""

import contextlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jax

from tftpu.config.mesh import mesh_sizes
from tftpu.engines.jax import mesh as meshes
from tftpu.engines.jax.engine import JaxEngine
from tftpu.errors import UserError
from tftpu.tpu import environment
from tftpu.tpu.compiler_options import AUTO

# The engine of the last `connect`: models do not know of it.
_connected: list[JaxEngine] = []


def connect(
    tpu: str, virtual_devices: int | None, mesh: str | None, compiler_options: str = AUTO
) -> JaxEngine:
    """Returns the engine for all devices that JAX finds.

    Args:
        tpu: "auto": the TPU if there is one, else GPUs, else the CPU; "local": the TPU of this
            machine; "none": no TPU.
        virtual_devices: number of devices that the CPU is split into.
        mesh: as for `tftpu.connect`.
        compiler_options: as for `tftpu.connect`.

    Raises:
        UserError: a requested TPU is not available, or the mesh does not fit the devices.
    """
    found = _devices(tpu, virtual_devices)
    sizes = mesh_sizes(mesh, len(found))
    _connected[:] = [JaxEngine(meshes.make(sizes, found), compiler_options)]
    return _connected[0]


def current() -> JaxEngine:
    """Returns the engine of the last `connect`; without one, that of the first device."""
    if not _connected:
        _connected.append(JaxEngine(meshes.make(mesh_sizes(None, 1), _found()[:1])))
    return _connected[0]


def forget_connected() -> None:
    """Forgets the engine of the last `connect`, as in a new process."""
    _connected.clear()


def attached_platform() -> str:
    """Returns the platform that JAX sees: "tpu", "gpu" or "cpu"."""
    return _found()[0].platform


def _devices(tpu: str, virtual_devices: int | None) -> Sequence[meshes.Device]:
    if virtual_devices is not None or tpu == "none":
        return _virtual_cpus(virtual_devices) if virtual_devices else _without_tpu()
    if tpu not in ("auto", "local"):
        raise UserError(
            f"tpu={tpu!r} names a TPU, and the JAX engine runs on the machine that the TPU is "
            "attached to: run there, with tpu='local'."
        )
    devices = _found()
    if tpu == "local" and devices[0].platform != "tpu":
        raise UserError(
            f"tpu='local' was requested, and JAX finds {len(devices)} {devices[0].platform} "
            "device(s): install tftpu with its [jax-tpu] extra on a TPU VM; tpu='none' trains on "
            "the CPU or GPUs."
        )
    return devices


def _found() -> Sequence[meshes.Device]:
    """Returns the devices that JAX chooses.

    A TPU's library that is installed for preflight alone would first look for chips, and complain.
    """
    others = importlib.metadata.entry_points(group="jax_plugins")  # of GPUs, for one
    settings: Any = jax.config  # it states no types of its options
    if settings.jax_platforms is None and not others and not environment.has_tpu():
        use_cpu()
    return jax.devices()


def _without_tpu() -> Sequence[meshes.Device]:
    devices = _found()
    return jax.devices("cpu") if devices[0].platform == "tpu" else devices


def use_cpu() -> None:
    """Makes JAX run on the CPU, so that a TPU's library does not look for its chips.

    A JAX that is running already keeps its devices.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")


def _virtual_cpus(count: int) -> Sequence[meshes.Device]:
    with contextlib.suppress(RuntimeError):  # a JAX that is running already keeps its devices
        jax.config.update("jax_num_cpu_devices", count)
    use_cpu()
    found = jax.devices("cpu")
    if len(found) < count:
        raise UserError(
            f"virtual_devices={count} cannot be set up, JAX already runs with {len(found)} CPU "
            "device(s): call tftpu.connect() before anything else uses JAX."
        )
    return found[:count]
