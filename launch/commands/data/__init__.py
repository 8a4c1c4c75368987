"""The commands `tftpu data ...`."""
