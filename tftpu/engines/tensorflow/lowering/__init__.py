"""Lowers programs of the TensorFlow engine for TPUs, on a machine without one."""
