"""A server of trained models over HTTP, for CPUs and GPUs."""
