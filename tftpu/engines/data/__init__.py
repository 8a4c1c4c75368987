"""Users' data as batches of static shape, for any engine."""
