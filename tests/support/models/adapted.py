"""Models of the zoo with adapters and quantized kernels."""

import keras
import numpy as np

from tests.support.models import zoo
from tftpu.models import adapters


def built(family: str) -> keras.Model:
    """Returns the tiny model of a family; a head whose weights begin as zeros has others."""
    keras.utils.set_random_seed(0)
    model = zoo.build(family)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1 and not np.any(np.asarray(variable)):
            variable.assign(np.random.default_rng(0).normal(0.0, 0.3, variable.shape))
    return model


def output(model: keras.Model, family: str) -> np.ndarray:
    return np.asarray(model(zoo.batch(family)[0], training=False))


def stir(model: keras.Model) -> None:
    """Gives every adapter its own values, as if it were trained."""
    rng = np.random.default_rng(1)
    for variable in model.weights:
        if variable.path.endswith(adapters.ADAPTERS):
            variable.assign(rng.normal(0.0, 0.3, variable.shape))
