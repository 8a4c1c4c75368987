"""The checks of `tftpu doctor`, one subject per module; none imports TensorFlow."""
