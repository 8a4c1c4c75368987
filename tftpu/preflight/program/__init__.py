"""Reads a compiled program: instructions, loops, kernels, and how long each array lives."""
