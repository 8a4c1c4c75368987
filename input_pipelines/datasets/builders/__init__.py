"""Data sets that TFDS prepares from what comes with Python packages."""
