"""TPU slices, their hardware, prices and environment variables."""
