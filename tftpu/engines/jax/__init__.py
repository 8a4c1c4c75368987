"""The JAX engine: one program over a named mesh of devices, partitioned by XLA."""
