"""Runs the TPU compiler in their own processes, several side by side, and keeps its answers."""
