"""Data sets that TFDS prepares from files of Python packages."""
