"""The choice of an engine."""

from typing import TYPE_CHECKING

from tftpu.engines import backend

if TYPE_CHECKING:
    import keras

    from tftpu.engines.engine import Engine


def engine_of(model: "keras.Model") -> "Engine":
    """Returns the engine whose scope a model was built in.

    Raises:
        UserError: the model is on a backend that no engine serves, or of Keras 2, or was built
            outside the scope of the connected engine.
    """
    backend.check_model(model)
    from tftpu.engines.tensorflow import cluster

    return cluster.engine_of(model)


def attached_platform() -> str:
    """Returns the platform of the available devices: "tpu", "gpu" or "cpu"."""
    from tftpu.engines.tensorflow import cluster

    return cluster.attached_platform()
