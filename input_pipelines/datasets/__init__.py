"""Sources of examples, one file each."""
