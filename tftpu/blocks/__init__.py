"""Recomputes the blocks of any model, or segments of its graph, or runs the blocks as a loop."""

REMATS = ("none", "block", "products", "attention", "offload")  # values of `TrainConfig.remat`
JAX_REMATS = ("products", "attention", "offload")  # the values that need the JAX engine
