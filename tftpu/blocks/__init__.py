"""Finds the blocks of any model, or segments of its graph, to recompute them or run a loop."""

REMATS = ("none", "block", "products", "attention", "offload")  # what the backward pass recomputes
JAX_REMATS = ("products", "attention", "offload")  # values of `remat` that need the JAX engine
