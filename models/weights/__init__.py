"""Weights of other libraries: reading, writing and mapping them."""

from tftpu.models.weights.loading import LoadReport, freeze, load_weights, save_weights

__all__ = ["LoadReport", "freeze", "load_weights", "save_weights"]
