"""Metrics that Keras lacks."""

import math

import keras


@keras.saving.register_keras_serializable("tftpu")
class BitsPerToken(keras.metrics.SparseCategoricalCrossentropy):
    """The cross-entropy in bits a token; bits per byte where a token is a byte."""

    def __init__(self, name: str = "bits_per_token", from_logits: bool = True, **kwargs):
        super().__init__(name=name, from_logits=from_logits, **kwargs)

    def result(self):
        return super().result() / math.log(2)
