"""Keras's own tests, run through `Trainer`."""
