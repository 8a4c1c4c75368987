"""The commands `tftpu launch ...`."""
