"""From "what is there" to a `tf.distribute.Strategy`; nothing after it asks what hardware it is."""

import collections
import contextlib
import glob
import importlib.util
import os
from pathlib import Path

import tensorflow as tf

from tftpu.engines.tensorflow import internals
from tftpu.errors import UserError
from tftpu.runtime import hosts
from tftpu.tpu.slices import parse_slice


def connect(tpu: str = "auto", virtual_devices: int | None = None) -> tf.distribute.Strategy:
    """The strategy for the hardware at hand.

    Args:
        tpu: "auto": a TPU if there is one, else all GPUs, else the CPU. "local": the TPU of this
            machine (TPU VM, Colab, Kaggle). "none": no TPU. Else the name of a TPU.
        virtual_devices: splits the CPU into so many virtual devices, so that a machine without
            accelerators runs the data-parallel path.

    Where TF_CONFIG names several workers and there is no TPU, they train together.

    Raises:
        UserError: a TPU that was asked for is not there; never a silent fall back to the CPU.
    """
    if virtual_devices is not None:
        if hosts.task().count > 1:
            raise UserError(
                "--virtual_devices splits the CPU of one machine, and TF_CONFIG names several."
            )
        return _virtual_cpus(virtual_devices)
    if tpu == "auto":
        tpu = find_tpu() or "none"
    if tpu != "none":
        return _connect_tpu(tpu)
    if hosts.task().count > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    gpus = tf.config.list_logical_devices("GPU")
    if gpus:
        return tf.distribute.MirroredStrategy([gpu.name for gpu in gpus])
    return tf.distribute.get_strategy()


def find_tpu() -> str | None:
    """What `tpu="auto"` connects to: "local", the name in TPU_NAME, or None."""
    name = os.environ.get("TPU_NAME")
    if name:
        return name
    # PCI devices of a TPU VM: /dev/accel0 up to v4, /dev/vfio/0 from v5e on.
    if glob.glob("/dev/accel*") or (glob.glob("/dev/vfio/[0-9]*") and _has_libtpu()):
        return "local"
    return None


def simulated_slice(name: str) -> tf.distribute.TPUStrategy:
    """The real TPUStrategy on made-up metadata: steps trace, and cannot be run.

    Every failure on the Python side of a TPU shows up in tracing: a variable that may not be
    assigned in replica context, an op of the host, a dynamic shape, a string.

    Args:
        name: as Google writes it, "v3-8", "v5e-8", "v5litepod-8"; all of it as one host.

    Raises:
        UserError: the name is none of a slice, or its size is not sold.
    """
    return tf.distribute.TPUStrategy(_SimulatedResolver(parse_slice(name).replicas))


def _virtual_cpus(virtual_devices: int) -> tf.distribute.Strategy:
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) < virtual_devices:
        wanted = [tf.config.LogicalDeviceConfiguration()] * virtual_devices
        with contextlib.suppress(RuntimeError):  # TensorFlow runs already: what it has must do
            tf.config.set_logical_device_configuration(cpu, wanted)
    found = tf.config.list_logical_devices("CPU")
    if len(found) < virtual_devices:
        raise UserError(
            f"virtual_devices={virtual_devices} cannot be set up, TensorFlow already runs with {len(found)} CPU "
            "device(s): call tftpu.connect() before anything else uses TensorFlow."
        )
    if virtual_devices == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [device.name for device in found[:virtual_devices]],
        # Sums in a fixed order; and the default's collectives get in each other's way where a
        # process makes more than one strategy.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def _connect_tpu(name: str) -> tf.distribute.TPUStrategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        first = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"--tpu={name} was asked for and cannot be connected to. {_likely_cause(name)} "
            f"TensorFlow says: {first}"
        ) from error


def _likely_cause(name: str) -> str:
    """The likeliest reason why a TPU is not there, from what is installed and attached."""
    if not has_tpu_kernels():
        return (
            "The TensorFlow installed here is not the TPU's: run `pip install tftpu[tpu]` in a "
            "fresh environment (plain tensorflow or tensorflow-cpu overwrites tensorflow-tpu)."
        )
    if name == "local" and find_tpu() is None:
        return "This machine has no TPU attached; --tpu=none trains on what there is."
    if Path("/tmp/libtpu_lockfile").exists():
        return (
            "Another process holds the TPU, or died holding it: end it, then "
            "`rm /tmp/libtpu_lockfile`."
        )
    return "Is the TPU running, and is its name right?"


def has_tpu_kernels() -> bool:
    """Whether the TensorFlow that is loaded was built for TPUs."""
    return any("TPU" in device for device in internals.kernel_devices("TPUExecute"))


def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


_Device = collections.namedtuple("_Device", "name device_type")


class _SimulatedResolver:
    """Answers what TPUStrategy asks of a TPUClusterResolver, for one host.

    Private interface of TensorFlow: tried with 2.19 to 2.21.
    """

    tpu_hardware_feature = None

    def __init__(self, replicas: int):
        self._replicas = replicas

    def master(self) -> str:
        return ""

    def get_tpu_system_metadata(self):
        prefix = "/job:localhost/replica:0/task:0/device:"
        devices = [_Device(f"{prefix}CPU:0", "CPU")]
        devices += [_Device(f"{prefix}TPU:{core}", "TPU") for core in range(self._replicas)]
        return tf.tpu.experimental.TPUSystemMetadata(
            num_cores=self._replicas,
            num_hosts=1,
            num_of_cores_per_host=self._replicas,
            topology=None,
            devices=devices,
        )
