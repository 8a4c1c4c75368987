"""Weights of other libraries: reading, writing and mapping them."""

from tftpu.models.weights.loading import Report, freeze, load_weights, save_weights

__all__ = ["Report", "freeze", "load_weights", "save_weights"]
