"""Engines run train steps on devices; the trainer depends only on the protocol in `engine.py`."""
