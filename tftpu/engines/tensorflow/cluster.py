"""Selects an engine for the available hardware, and finds the engine of a model."""

import contextlib
import glob
import importlib.util
import os
import socket
from pathlib import Path

import keras
import tensorflow as tf

from tftpu.config import ClusterConfig
from tftpu.config.validation import check_types
from tftpu.engines.tensorflow import internals
from tftpu.engines.tensorflow.engine import TensorFlowEngine, format_scope_error
from tftpu.errors import UserError, counted, find_first_line
from tftpu.runtime import hosts

_ANSWERS = 8.0  # seconds to wait for a connection to a TPU's machine

# The engine that the last `connect` created. A model that was built outside the engine's scope has
# no reference to it.
_connected: list[TensorFlowEngine] = []


def connect(tpu: str = "auto", virtual_devices: int | None = None) -> TensorFlowEngine:
    """Returns the engine for the available hardware.

    If TF_CONFIG names several workers and there is no TPU, the workers train together.

    Args:
        tpu: "auto": a TPU if there is one, otherwise all GPUs, otherwise the CPU. "local": the TPU
            of this machine (TPU VM, Colab, Kaggle). "none": no TPU. Another text names a TPU.
        virtual_devices: number of devices that the CPU is split into, to run data-parallel training
            on a machine without accelerators.

    Raises:
        UserError: a requested TPU is not available, or the options contradict each other.
    """
    _connected[:] = [TensorFlowEngine(choose_strategy(tpu, virtual_devices))]
    return _connected[0]


def resolve_engine(model: keras.Model) -> TensorFlowEngine:
    """Returns the engine whose scope a model was built in.

    Raises:
        UserError: the model is not a Keras model on TensorFlow, or was built outside the scope of
            the connected engine, so that it would train on a single device.
    """
    strategy = getattr(model, "distribute_strategy", None)
    if not isinstance(strategy, tf.distribute.Strategy):
        raise UserError(f"{type(model).__name__} is not a Keras model on the TensorFlow backend.")
    engine = TensorFlowEngine(strategy)
    if not engine.distributes and any(connected.distributes for connected in _connected):
        raise UserError(format_scope_error(f"The model {model.name!r}"))
    return engine


def forget_connected() -> None:
    """Forgets the engine of the last `connect`, as in a new process."""
    _connected.clear()


def choose_strategy(tpu: str, virtual_devices: int | None) -> tf.distribute.Strategy:
    """Returns the strategy for the available hardware; takes the arguments of `connect`."""
    devices = ClusterConfig(tpu, virtual_devices)
    check_types("cluster", devices)
    devices.validate()
    if virtual_devices is not None:
        if hosts.read_task().count > 1:
            raise UserError(
                "virtual_devices splits the CPU of one machine, but TF_CONFIG names several "
                "machines: leave out one of the two."
            )
        return _create_virtual_cpus(virtual_devices)
    if tpu == "auto":
        tpu = find_tpu() or "none"
    if tpu != "none":
        return _connect_tpu(tpu)
    if hosts.read_task().count > 1:
        with hosts.ended_if_alone(hosts.read_task(), hosts.ARRIVE):
            return tf.distribute.MultiWorkerMirroredStrategy()
    gpus = tf.config.list_logical_devices("GPU")
    if gpus:
        return tf.distribute.MirroredStrategy([gpu.name for gpu in gpus])
    return tf.distribute.get_strategy()


def find_tpu() -> str | None:
    """Returns the TPU that `tpu="auto"` uses: the name in TPU_NAME, "local", or None."""
    name = os.environ.get("TPU_NAME")
    if name:
        return name
    # Device files of a TPU VM: /dev/accel0 up to v4, /dev/vfio/0 from v5e on.
    if glob.glob("/dev/accel*") or (glob.glob("/dev/vfio/[0-9]*") and _has_libtpu()):
        return "local"
    return None


def detect_platform() -> str:
    """Returns the best platform that TensorFlow finds: "tpu", "gpu" or "cpu"."""
    for kind in ("TPU", "GPU"):
        if tf.config.list_logical_devices(kind):
            return kind.lower()
    return "cpu"


def has_tpu_kernels() -> bool:
    """Returns whether the loaded TensorFlow was built for TPUs."""
    return any("TPU" in device for device in internals.list_kernel_devices("TPUExecute"))


def split_cpu(count: int) -> None:
    """Splits the CPU into virtual devices; has no effect if TensorFlow is initialized."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) < count:
        wanted = [tf.config.LogicalDeviceConfiguration()] * count
        with contextlib.suppress(RuntimeError):
            tf.config.set_logical_device_configuration(cpu, wanted)


def _create_virtual_cpus(count: int) -> tf.distribute.Strategy:
    split_cpu(count)
    found = tf.config.list_logical_devices("CPU")
    if len(found) < count:
        raise UserError(
            f"virtual_devices={count} cannot take effect, because TensorFlow already runs with "
            f"{counted(len(found), 'CPU device')}: call tftpu.connect() before anything else uses "
            f"TensorFlow, or on the command line give --virtual_devices={count}."
        )
    if count == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [device.name for device in found[:count]],
        # Adds up in a fixed order. The collectives used by default also interfere with each other
        # if a process creates more than one strategy.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def _connect_tpu(name: str) -> tf.distribute.TPUStrategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if name != "local":
            _check_reachable(name, resolver.master())
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        first = find_first_line(error)[:200]
        raise UserError(
            f"tpu={name!r} was requested, but cannot be connected to. {_find_likely_cause(name)} "
            f"TensorFlow reports: {first}"
        ) from error


def _check_reachable(name: str, address: str) -> None:
    """Raises `UserError` if a TPU does not answer; TensorFlow would wait for minutes.

    Args:
        name: the name of the TPU.
        address: the address of the TPU's machine, "grpc://HOST:PORT".
    """
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"tpu={name!r} was requested, but nothing answered at {address} ({error}). Is the TPU "
            "running, is its name right, and does this machine reach its network?"
        ) from error


def _find_likely_cause(name: str) -> str:
    """Returns a message with the likeliest reason why a TPU is missing, and what to do."""
    if not has_tpu_kernels():
        return (
            "The TensorFlow installed here does not support TPUs: install tftpu with its [tpu] "
            "extra in a fresh environment (plain tensorflow or tensorflow-cpu overwrites "
            "tensorflow-tpu)."
        )
    if name == "local" and find_tpu() is None:
        return 'This machine has no TPU attached; tpu="none" trains on the CPU or GPUs.'
    if Path("/tmp/libtpu_lockfile").exists():
        return (
            "Another process uses the TPU, or died without releasing it: end it, then run "
            "`rm /tmp/libtpu_lockfile`."
        )
    return "Is the TPU running, and is its name right?"


def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None
