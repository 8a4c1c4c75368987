"""Engines run train steps on devices; the trainer knows the protocol of `engine.py` alone."""
