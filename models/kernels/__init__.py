"""Pallas kernels and TensorFlow ops; no other package of models imports JAX or TensorFlow."""
