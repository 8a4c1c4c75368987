"""How the families assemble their blocks: one by one, recomputed, or as one loop."""
