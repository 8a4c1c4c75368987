"""Engines: what runs a train step on devices. `engine.py` is the protocol that the trainer knows."""
