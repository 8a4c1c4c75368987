"""What `tftpu doctor` looks at, one kind of thing a module; none imports TensorFlow."""
