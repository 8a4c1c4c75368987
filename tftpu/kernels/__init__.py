"""Kernels, and other code for one backend of Keras each: Pallas, TensorFlow ops, recomputation."""

ATTENTIONS = ("auto", "plain", "flash")  # what `attention.attention` is computed by
