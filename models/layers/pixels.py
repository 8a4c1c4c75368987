"""Pixels as they come, uint8, to what the models of the zoo take: done on the device.

A batch of uint8 is a quarter of one of float32 on its way from the host.
"""

import keras
from keras import ops


@keras.saving.register_keras_serializable("tftpu")
class Standardise(keras.layers.Layer):
    """Pixels from 0 to 255 to numbers of about zero mean and unit variance: x / 64 - 1.2.

    Worked out in float32; the result has the layer's compute dtype.
    """

    def call(self, pixels):
        return ops.cast(ops.cast(pixels, "float32") / 64.0 - 1.2, self.compute_dtype)


def standardised(model: keras.Model) -> keras.Model:
    """The model behind `Standardise`: it takes pixels, (batch, height, width, channels), uint8."""
    pixels = keras.Input(model.input_shape[1:], dtype="uint8", name="pixels")
    whole = keras.Model(pixels, model(Standardise(name="standardise")(pixels)), name=model.name)
    whole.hyperparameters = model.hyperparameters
    return whole
