"""Standardises uint8 pixels on the device, before a model.

A batch of uint8 is a quarter of the size of one of float32 on its way from the host.
"""

import keras

from tftpu.models.blocks.block_model import BlockModel


def standardize_pixels(model: keras.Model) -> keras.Model:
    """Returns `model` preceded by a layer that maps pixels to about zero mean, unit variance.

    The layer is Keras's own, so Keras alone can load the `.keras` file of a model without custom
    classes. It computes x / 64 - 1.2 in float32.

    Args:
        model: takes images, (batch, height, width, channels) float. A model of the zoo stays one,
            with the same hyper-parameters.

    Returns:
        A model that takes pixels of the same shape, uint8.
    """
    pixels = keras.Input(model.input_shape[1:], dtype="uint8", name="pixels")
    scale = keras.layers.Rescaling(1 / 64, offset=-1.2, dtype="float32", name="standardise")
    kind = BlockModel if isinstance(model, BlockModel) else keras.Model
    return kind(pixels, model(scale(pixels)), name=model.name)
