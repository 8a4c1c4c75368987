"""The plan of a run: the search for the cheapest slice, mesh and memory settings."""
