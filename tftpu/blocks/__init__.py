"""The blocks of any model, or segments of its graph: found, recomputed, or run as a loop."""

REMATS = ("none", "block", "products", "attention", "offload")  # what the backward pass recomputes
JAX_REMATS = ("products", "attention", "offload")  # those that TensorFlow lacks
