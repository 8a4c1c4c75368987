"""Runs the TPU compiler in processes of their own, several side by side, and keeps its answers."""
