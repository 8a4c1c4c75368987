"""TPU kernels in Pallas, put inside the TensorFlow step: the one place where models see it."""
