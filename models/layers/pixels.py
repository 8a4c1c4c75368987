"""Standardises uint8 pixels on the device, before a model of the zoo.

A batch of uint8 is a quarter of the size of one of float32 on its way from the host.
"""

import keras

from tftpu.models.blocks.block_model import BlockModel
from tftpu.tensors import Tensor, ops


@keras.saving.register_keras_serializable("tftpu")
class Standardise(keras.layers.Layer):
    """The map of pixels in [0, 255] to about zero mean and unit variance: x / 64 - 1.2.

    Computed in float32; the result has the layer's compute dtype.
    """

    def call(self, pixels: Tensor) -> Tensor:
        return ops.cast(ops.cast(pixels, "float32") / 64.0 - 1.2, self.compute_dtype)


def standardize_pixels(model: BlockModel) -> BlockModel:
    """Returns the model behind a `Standardise`, with the same hyper-parameters.

    Args:
        model: takes images, (batch, height, width, channels) float.

    Returns:
        A model that takes pixels of the same shape, uint8.
    """
    pixels = keras.Input(model.input_shape[1:], dtype="uint8", name="pixels")
    outputs = model(Standardise(name="standardise")(pixels))
    return BlockModel(pixels, outputs, model.name)
