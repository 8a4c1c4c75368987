"""Data: the commands `tftpu data ...`."""
