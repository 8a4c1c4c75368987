"""Pallas kernels, and what models need of TensorFlow: nothing else here imports either."""
