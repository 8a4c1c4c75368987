"""The commands `tftpu config ...`."""
