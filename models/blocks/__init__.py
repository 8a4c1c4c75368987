"""Models of the families, whose blocks run one by one, recomputed, or as one loop."""
