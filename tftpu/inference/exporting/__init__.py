"""Exports trained models for other programs, and compares their outputs with the model's."""
