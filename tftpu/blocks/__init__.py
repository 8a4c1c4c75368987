"""The repeated blocks of any model: found by structure, recomputed, or run as a loop."""

REMATS = ("none", "block", "products", "offload")  # what the backward pass recomputes
JAX_REMATS = ("products", "offload")  # those that TensorFlow lacks
