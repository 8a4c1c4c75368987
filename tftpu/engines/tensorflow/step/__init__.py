"""The train step and the evaluation step of one replica of the TensorFlow engine."""
