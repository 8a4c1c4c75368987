"""Code for one backend of Keras each: Pallas kernels, TensorFlow ops, recomputation.

No other package of models imports JAX or TensorFlow.
"""
