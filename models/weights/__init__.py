"""Reads and writes weight files of other libraries, and maps them to the zoo's variables."""

from tftpu.models.weights.loading import LoadReport, freeze, load_weights, save_weights

__all__ = ["LoadReport", "freeze", "load_weights", "save_weights"]
