"""The plan of a run: the search for the slice, mesh and memory settings that it costs least on."""
