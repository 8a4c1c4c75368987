"""The blocks of any model, or segments of its graph: found, recomputed, or run as a loop."""
