"""Base classes of the families' models, whose blocks may be recomputed or run as one loop."""
