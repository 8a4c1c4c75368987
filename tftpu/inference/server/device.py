"""The name of the device on which a model is computed."""

import os
import sys
from collections.abc import Sequence

_ON_GPUS = tuple(
    f"{name}ExecutionProvider" for name in ("CUDA", "Tensorrt", "MIGraphX", "ROCM", "Dml")
)
_NVIDIA = "/dev/nvidiactl"  # exists where a driver of NVIDIA is installed, also in containers


def find_tensorflow_device() -> str:
    """Returns the device that TensorFlow uses, "GPU" or "CPU"; warns about an idle GPU."""
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        return "GPU"
    _warn("this TensorFlow is built without CUDA, or does not find it: install tftpu[gpu,serve]")
    return "CPU"


def find_onnxruntime_device(providers: Sequence[str]) -> str:
    """Returns "GPU" or "CPU" for a session of ONNX Runtime; warns if it leaves a GPU idle."""
    if any(name in _ON_GPUS for name in providers):
        return "GPU"
    _warn(
        "this ONNX Runtime has no CUDA: serve a SavedModel or a run with tftpu[gpu,serve], or put "
        "onnxruntime-gpu in place of onnxruntime"
    )
    return "CPU"


def _warn(reason: str) -> None:
    if os.path.exists(_NVIDIA):
        print(
            f"tftpu: warning: the model runs on the CPU beside a GPU, as {reason}.", file=sys.stderr
        )
