"""After training: commands on the folder of a run."""
