"""Predictions for data of any size: the computed columns, and the files."""
