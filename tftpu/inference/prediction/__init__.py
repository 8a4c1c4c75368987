"""Predictions for data of any size: what is computed, and the files that it is written to."""
