"""The TensorFlow engine: TPUStrategy, and the strategies for GPUs and CPUs."""
