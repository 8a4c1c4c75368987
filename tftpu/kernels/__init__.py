"""Kernels, and other code for a single backend: Pallas, TensorFlow ops, recomputation."""

KINDS_OF_ATTENTION = ("plain", "flash")
ATTENTIONS = ("auto", *KINDS_OF_ATTENTION)  # the values of the `attention` argument
