"""Chooses the engine for the hardware, a cluster or a model."""

import importlib.util
from typing import TYPE_CHECKING

from tftpu.config import ClusterConfig
from tftpu.config.mesh import AUTO as AUTO_MESH
from tftpu.config.validation import check_types
from tftpu.engines import backend
from tftpu.errors import UserError
from tftpu.runtime import hosts
from tftpu.runtime.hosts import Task
from tftpu.tpu import environment
from tftpu.tpu.compiler_options import AUTO
from tftpu.tpu.hardware import find_attached_tpu
from tftpu.tpu.slices import GENERATIONS, Generation

if TYPE_CHECKING:
    import keras

    from tftpu.engines.engine import Engine
    from tftpu.engines.lowered import Lowering


def connect(
    tpu: str = "auto",
    virtual_devices: int | None = None,
    engine: str = "auto",
    mesh: str | None = None,
    compiler_options: str = AUTO,
    host_timeout: float = 30.0,
) -> "Engine":
    """Returns the engine for the available hardware.

    Call it before anything imports Keras: an engine runs on the Keras backend of its name. Where
    TF_CONFIG names several workers, they train together; on the JAX engine, so do the hosts of a
    TPU slice.

    Args:
        tpu: "auto": a TPU if there is one, otherwise all GPUs, otherwise the CPU. "local": the TPU
            of this machine (TPU VM, Colab, Kaggle). "none": no TPU. Another text names a TPU.
        virtual_devices: number of devices that the CPU is split into, so that a machine without
            accelerators can run programs for several devices. On the JAX engine, this splits the
            CPU of each host.
        engine: "tensorflow": every device holds the whole model, and they share the batch. "jax":
            one program over a mesh, which can also divide the model. "auto": jax if there is a
            mesh, if Keras's backend is JAX, or if only JAX can use the TPU; otherwise tensorflow.
        mesh: for the JAX engine, axes and sizes, such as "fsdp:8" or "data:2,fsdp:-1", where -1
            takes the devices that are left. Devices along "data" and "fsdp" divide the batch;
            devices along "fsdp" and "tensor" divide the model. None: "data:-1".
        compiler_options: for the JAX engine, options of XLA for the train step, such as
            "xla_tpu_scoped_vmem_limit_kib=65536". "auto": those that preflight assumes for the
            TPU's generation; none on other hardware.
        host_timeout: for the JAX engine on several hosts: the seconds without a heartbeat after
            which a host counts as lost, and the others end.

    Raises:
        UserError: a requested TPU is not available (the CPU never replaces it silently), the engine
            cannot use it, the mesh does not fit the devices, or Keras is loaded with another
            backend.
        HostLost: another host did not connect in time.
    """
    wanted = ClusterConfig(tpu, virtual_devices, engine, mesh, compiler_options, host_timeout)
    check_types("cluster", wanted)
    wanted.validate()
    check_generation(choose_engine(wanted), _find_generation(wanted))
    if choose_backend(wanted) == "jax":
        from tftpu.engines.jax import cluster as jax_cluster

        if mesh == AUTO_MESH:
            raise UserError(
                "mesh='auto' depends on the model. `tftpu train` and `tftpu preflight` choose "
                "the mesh for a config; for your own model, tftpu.preflight.check finds a mesh "
                "that fits."
            )
        return jax_cluster.connect(tpu, virtual_devices, mesh, compiler_options, host_timeout)
    from tftpu.engines.tensorflow import cluster

    return cluster.connect(tpu, virtual_devices)


def find_task(wanted: ClusterConfig) -> Task:
    """Returns the index of this process and the number of processes, without connecting them.

    Args:
        wanted: the settings of the cluster; call `choose_backend` with them first.

    Raises:
        UserError: TF_CONFIG is invalid.
        HostLost: the address of the first host of a TPU slice was not found.
    """
    if backend.read_name() == "jax" and hosts.read_task().count == 1 and environment.has_tpu():
        from tftpu.engines.jax import cluster as jax_cluster

        return jax_cluster.find_task(wanted.tpu, wanted.virtual_devices)
    return hosts.read_task()


def choose_engine(wanted: ClusterConfig) -> str:
    """Returns the name of the engine that `connect` selects for a cluster."""
    if wanted.engine != "auto":
        return wanted.engine
    return "jax" if find_reason_for_jax(wanted) else "tensorflow"


def find_reason_for_jax(wanted: ClusterConfig) -> str:
    """Returns why "auto" selects the JAX engine for a cluster; "" if it selects TensorFlow's."""
    if wanted.mesh is not None:
        return f"the mesh {wanted.mesh!r} needs it"
    if backend.read_name() == "jax":
        return "Keras runs on JAX"
    if not _uses_attached_tpu(wanted):
        return ""
    generation = _find_generation(wanted)
    if generation and not generation.supports_tensorflow:
        return f"TensorFlow does not support {generation.name}"
    if environment.can_jax_drive_tpus():
        return "the TensorFlow installed here cannot use this TPU, and JAX can"
    return ""


def _uses_attached_tpu(wanted: ClusterConfig) -> bool:
    local = wanted.tpu in ("auto", "local") and wanted.virtual_devices is None
    return local and environment.has_tpu()


def _find_generation(wanted: ClusterConfig) -> Generation | None:
    """Returns the generation of this machine's TPU; None if unknown or not used by `wanted`."""
    return GENERATIONS.get(find_attached_tpu() or "") if _uses_attached_tpu(wanted) else None


def check_generation(engine: str, generation: Generation | None) -> None:
    """Raises `UserError` if an engine cannot use a generation of TPUs.

    Args:
        engine: name of the engine.
        generation: the generation; None if it is not known.
    """
    if engine == "tensorflow" and generation and not generation.supports_tensorflow:
        raise UserError(
            f"TensorFlow does not support {generation.name}: use the JAX engine, with "
            "--config.cluster.engine=jax, or with engine='jax' in Python."
        )


def choose_backend(wanted: ClusterConfig) -> str:
    """Makes Keras run on the backend of the engine for a cluster; returns its name.

    Raises:
        UserError: Keras is already loaded with another backend, JAX is not installed, or a setting
            needs the JAX engine.
    """
    name = choose_engine(wanted)
    if name == "tensorflow" and wanted.compiler_options != AUTO:
        raise UserError(
            f"compiler_options={wanted.compiler_options!r} work only with the JAX engine, but "
            "this run uses the TensorFlow engine: set engine='jax', or leave them out."
        )
    if name == "jax" and importlib.util.find_spec("jax") is None:
        raise UserError(
            "The JAX engine needs jax, which is not installed: install tftpu with its [jax] extra, "
            "or [jax-tpu] on a TPU VM."
        )
    backend.use(name)
    return name


def find_engine(model: "keras.Model") -> "Engine":
    """Returns the engine whose scope a model was built in.

    Raises:
        UserError: no engine supports the model's backend, the model belongs to Keras 2, or it was
            built outside the scope of the connected engine.
    """
    backend.check_model(model)
    if backend.read_name() == "jax":
        from tftpu.engines.jax import cluster as jax_cluster

        return jax_cluster.resolve_engine()
    from tftpu.engines.tensorflow import cluster

    return cluster.resolve_engine(model)


def choose_lowering(wanted: ClusterConfig) -> "Lowering":
    """Returns the lowering of the engine that `connect` selects for a cluster.

    Raises:
        UserError: as for `choose_backend`.
    """
    if choose_backend(wanted) == "jax":
        from tftpu.engines.jax.lower import JaxLowering

        mesh = None if wanted.mesh == AUTO_MESH else wanted.mesh
        return JaxLowering(mesh, wanted.compiler_options)
    from tftpu.engines.tensorflow.lowering.lower import TensorFlowLowering

    return TensorFlowLowering()


def find_attached_platform() -> str:
    """Returns the platform of the available devices: "tpu", "gpu" or "cpu"."""
    if backend.read_name() == "jax":
        from tftpu.engines.jax import cluster as jax_cluster

        return jax_cluster.detect_platform()
    from tftpu.engines.tensorflow import cluster

    return cluster.detect_platform()
