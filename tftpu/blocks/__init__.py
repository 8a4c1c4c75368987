"""The repeated blocks of any model: found by structure, recomputed, or run as a loop."""
