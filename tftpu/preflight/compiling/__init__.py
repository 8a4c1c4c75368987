"""Runs the TPU compiler in separate processes, several in parallel, and caches its results."""
