"""The real TPUStrategy on a simulated slice: steps can be traced, but not run."""

import collections
from typing import TYPE_CHECKING, Any

from tftpu.tpu.slices import parse_slice

if TYPE_CHECKING:
    from tftpu.engines.tensorflow.engine import TensorFlowEngine


def simulated_slice(name: str) -> "TensorFlowEngine":
    """Returns an engine with the real TPUStrategy, given made-up metadata of a slice.

    Tracing a step with it finds what fails on a TPU: a variable that may not be assigned in replica
    context, an op that only a host can run, a dynamic shape, a string.

    Args:
        name: the slice as Google writes it: "v3-8", "v5e-8", "v5litepod-8"; always on one host.

    Raises:
        UserError: there is no slice of this name, or none of this size.
    """
    import tensorflow as tf

    from tftpu.engines.tensorflow.engine import TensorFlowEngine

    resolver: Any = _SimulatedResolver(parse_slice(name).replicas)
    return TensorFlowEngine(tf.distribute.TPUStrategy(resolver))


_Device = collections.namedtuple("_Device", "name device_type")


class _SimulatedResolver:
    """A stand-in for the TPUClusterResolver that TPUStrategy queries, for one host.

    It serves a private interface of TensorFlow, tested with 2.19 to 2.21.
    """

    tpu_hardware_feature = None

    def __init__(self, replicas: int):
        self._replicas = replicas

    def master(self) -> str:
        return ""

    def get_tpu_system_metadata(self):
        import tensorflow as tf

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
