"""Lowers a train step of the TensorFlow engine, without a config or a slice."""

from tftpu.config import TrainConfig
from tftpu.engines.lowered import LoweredStep
from tftpu.engines.tensorflow.lowering.lower import TensorFlowLowering


def lower(model_fn, batch_spec, replicas, precision, options=None, objectives=None) -> LoweredStep:
    """Lowers the train step of one replica; `options` are those of training, or the defaults."""
    options = options or TrainConfig()
    built = TensorFlowLowering().build(
        model_fn, batch_spec, replicas, precision, options, objectives
    )
    return built.lower()
